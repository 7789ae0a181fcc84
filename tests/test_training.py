"""Training: its configuration, its checkpoints, its log, and that it can be had again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import SMALL_PPO, TINY

import placer
from placer.cli.main import main
from placer.policies import load, reference
from placer.policies.decoders import Here, Processes
from placer.policies.params_env import weights_of
from placer.policies.pool import Clusters, draw_pool
from placer.policies.training import load_config, train
from placer.policies.training.config import Imitation, Length, Ppo, Stage, TrainingConfig
from placer.policies.training.imitation import evolved_actions
from placer.policies.training.log import COLUMNS
from placer.policies.training.records import differences, plain, record
from placer.report.progress import time_left
from placer.search.decoder import HEFT, WEIGHT_COUNT

torch.set_num_threads(1)

CONFIGS = sorted((Path(__file__).parent.parent / "trained_policies").glob("*.toml"))
TWO_STAGES = replace(
    TINY,
    seeds=2,
    checkpoint_rollouts=3,
    length=Length(decodes=480),
    stage=(
        Stage(families=("layered",), graphs=3, max_ops=80),
        Stage(families=("grid",), graphs=3, max_ops=80, clusters=Clusters(comm_ratio=(1.0, 4.0))),
    ),
    ppo=replace(SMALL_PPO, final_learning_rate=1e-4),
    imitation=Imitation(graphs=2, decodes=20, epochs=3),
)


def curve(path: Path) -> list[dict[str, str]]:
    """The log without what the clock says."""
    with path.with_name(f"{path.name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["spent_s"]
    return rows


def toml(config: TrainingConfig) -> str:
    """A configuration as a file, its tables inline."""

    def shown(value: object) -> str:
        if isinstance(value, dict):
            items = (f"{k} = {shown(v)}" for k, v in value.items() if v is not None)
            return "{" + ", ".join(items) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(shown, value)) + "]"
        return json.dumps(value)

    return "\n".join(f"{k} = {shown(v)}" for k, v in plain(config).items()) + "\n"


def command(config: Path, out: Path, *more: str) -> list[str]:
    train_it = ["train", "--config", str(config), "--out", str(out), *more]
    return [sys.executable, "-m", "placer.cli.main", *train_it]


def test_a_configuration_without_anything_is_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "default.toml"
    path.write_text('format = "placer-training/1"\n')
    assert load_config(path) == TrainingConfig()


def test_a_configuration_that_is_written_reads_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "two-stages.toml"
    path.write_text(toml(TWO_STAGES))
    assert load_config(path) == TWO_STAGES
    assert record(TrainingConfig, plain(TWO_STAGES)) == TWO_STAGES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "format is missing"),
        ('format = "placer-training/2"', "format is 'placer-training/2'"),
        ("[ppo]\nlearning_rat = 1", "unknown key ppo.learning_rat; did you mean learning_rate"),
        ("[[stage]]\n[[stage]]\nclusters = { devices = [1] }", r"stage\[1\].clusters: devices"),
        ("[[stage]]\nfamilies = ['layred']", r"stage\[0\]: there is no family 'layred'"),
        ("[[stage]]\nmax_ops = 10", "below the 80"),
        ("[length]\ndecodes = 10\nseconds = 1.0", "length: .* either decodes or seconds"),
        ("[length]\ndecodes = 0", "length: .* above 0"),
        ("seeds = 0", "seeds is 0"),
        ("first_seed = 1000000", "not within 0 .. 999999"),
        ("seeds = 1.5", "seeds is 1.5, not a whole number"),
        ('workers = "rat"', "workers is 'rat', not one of 'ray'"),
        ("workers = -1", "workers is -1"),
        ("[ppo]\nlayers = 64", "ppo.layers is 64, not a list"),
        ("[ppo]\nclip = nan", "ppo.clip is nan, not a finite"),
        ("stage = []", "there is no stage"),
        ('algorithm = "maskable-ppo"\n[imitation]\ngraphs = 2', "only decoder weights"),
        ('algorithm = "maskable-ppo"\nworkers = 2', "leave them out"),
        ("seeds = = 2", "line 2"),
    ],
)
def test_a_configuration_with_a_fault_is_refused_with_its_path(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "faulty.toml"
    head = "" if "format" in text or not text else 'format = "placer-training/1"\n'
    path.write_text(head + text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))


def test_the_configurations_that_ship_are_read() -> None:
    assert {path.stem for path in CONFIGS} >= {"generalist", "synthetic-only"}
    for path in CONFIGS:
        if path.stem != "suites":
            load_config(path)


def test_what_never_saw_a_reference_model_is_trained_on_made_up_graphs_alone() -> None:
    config = load_config(next(path for path in CONFIGS if path.stem == "synthetic-only"))
    seen = {family for stage in config.stage for family in stage.families}
    assert seen <= {"layered", "fork-join", "grid"}


def test_differences_say_every_path_that_changed() -> None:
    before = plain(TINY)
    now = plain(replace(TINY, seeds=2, ppo=replace(TINY.ppo, layers=(8, 8)), stage=(Stage(),)))
    told = differences(before, now)
    assert differences(before, before) == []
    assert "seeds was 1 and is 2 now" in told
    assert "ppo.layers was [8] and is [8, 8] now" in told
    assert any(text.startswith("stage[0].max_ops was 80") for text in told)


@given(st.floats(0, 2), st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
def test_stages_follow_each_other_and_the_last_goes_on(share: float, shares: list[float]) -> None:
    config = replace(TINY, stage=tuple(Stage(share=own) for own in shares))
    assert config.stage_at(0.0) == 0
    assert config.stage_at(1.0) == len(shares) - 1
    assert config.stage_at(share) <= config.stage_at(share + 0.1)


def test_the_learning_rate_falls_linearly() -> None:
    ppo = Ppo(learning_rate=1e-3, final_learning_rate=1e-4)
    assert ppo.learning_rate_at(0.0) == 1e-3
    assert ppo.learning_rate_at(0.5) == pytest.approx(5.5e-4)
    assert ppo.learning_rate_at(2.0) == pytest.approx(1e-4)
    assert Ppo().learning_rate_at(0.7) == Ppo().learning_rate


def test_training_writes_a_policy_with_every_seed_in_its_card(tmp_path: Path) -> None:
    texts: list[str] = []
    out = tmp_path / "here" / "tiny"
    card = train(out, replace(TINY, seeds=2), progress=lambda share, text: texts.append(text))
    policy = load(str(out))
    assert policy.card == card == json.loads((tmp_path / "here" / "tiny.json").read_text())
    assert [row["seed"] for row in policy.card["seeds"]] == [0, 1]
    assert policy.card["seed"] in (0, 1)
    assert policy.card["trained_on"]["families"] == ["layered"]
    assert record(TrainingConfig, policy.card["config"]) == replace(TINY, seeds=2)
    assert {"single", "HEFT", "ETF", "untrained, best of 16"} == set(policy.card["baselines"])
    assert any(text.startswith("seed 1") for text in texts)
    assert not (tmp_path / "here" / "tiny.checkpoint").exists()


def test_the_log_has_a_line_for_every_rollout(tmp_path: Path) -> None:
    train(tmp_path / "tiny", replace(TINY, seeds=2))
    rows = curve(tmp_path / "tiny")
    assert set(COLUMNS) == {*rows[0], "spent_s"}
    assert [int(row["decodes"]) for row in rows] == [8, 16, 24, 32] * 2
    assert [row["seed"] for row in rows] == ["0"] * 4 + ["1"] * 4
    assert all(0 < float(row["best_ratio"]) <= float(row["mean_ratio"]) for row in rows)


def test_learning_changes_the_policy_and_imitation_begins_elsewhere(tmp_path: Path) -> None:
    summary = draw_pool(5, 1, 80)[0].summary
    proposed = []
    for name, graphs in (("plain", 0), ("imitating", 4)):
        config = replace(TINY, imitation=Imitation(graphs=graphs, decodes=20, epochs=20))
        train(tmp_path / name, config)
        proposed.append(load(str(tmp_path / name)).weights(summary)[0])
    assert (proposed[0] != HEFT).any()
    assert np.abs(proposed[1] - HEFT).max() > np.abs(proposed[0] - HEFT).max()


@pytest.mark.parametrize("algorithm", ["ppo", "maskable-ppo"])
def test_a_killed_training_goes_on_to_the_same_curve(tmp_path: Path, algorithm: str) -> None:
    config = tmp_path / "two-stages.toml"
    sequential = replace(
        TWO_STAGES,
        algorithm="maskable-ppo",
        imitation=Imitation(),
        seeds=1,
        length=Length(decodes=600),
    )
    config.write_text(toml(TWO_STAGES if algorithm == "ppo" else sequential))
    train(tmp_path / "whole", load_config(config))
    killed = tmp_path / "killed"
    helped = ["--workers", "2"] if algorithm == "ppo" else []
    with subprocess.Popen(command(config, killed, *helped), stderr=subprocess.DEVNULL) as process:
        while not has_told(killed, rollouts=75 if algorithm == "ppo" else 20):
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.002)
        own = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed.json").exists()
    train(killed, load_config(config))
    assert curve(killed) == curve(tmp_path / "whole")
    if algorithm == "maskable-ppo":
        with pytest.raises(ValueError, match="op by op"):
            load(str(killed))
    weights = [tmp_path / f"{name}.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert len(own) >= len(helped)
    assert not [child for child in own if is_running(int(child))], "workers outlive who is killed"


def is_running(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def has_told(out: Path, *, rollouts: int) -> bool:
    log = out.with_name(f"{out.name}.csv")
    return log.exists() and log.read_bytes().count(b"\n") > rollouts


def test_a_checkpoint_of_another_configuration_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    out = tmp_path / "tiny"
    stopped(out, TINY)
    with pytest.raises(ValueError, match=r"ppo.epochs was 2 and is 3 now.*--fresh"):
        train(out, replace(TINY, ppo=replace(TINY.ppo, epochs=3)))
    train(out, replace(TINY, checkpoint_rollouts=2, workers=0))
    stopped(out, TINY)
    train(out, replace(TINY, seeds=2), fresh=True)
    assert len(curve(out)) == 8


def stopped(out: Path, config: TrainingConfig) -> None:
    """Train until there is a checkpoint, and stop as Ctrl-C does."""

    def stop(share: float, text: str) -> None:
        if out.with_name(f"{out.name}.checkpoint").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(out, config, progress=stop)


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiny.checkpoint").write_bytes(content)
    with pytest.raises(ValueError, match=r"tiny\.checkpoint: not a checkpoint"):
        train(tmp_path / "tiny", TINY)


def test_a_log_that_is_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "tiny", TINY)
    (tmp_path / "tiny.csv").write_text("")
    with pytest.raises(ValueError, match="shorter"):
        train(tmp_path / "tiny", TINY)


def test_processes_decode_to_the_same_costs_and_come_back_when_killed() -> None:
    pool = draw_pool(5, 3, 80)
    judges = [item.judge for item in pool]
    numbers = np.array([0, 2, 1, 1, 0])
    weights = HEFT + np.random.default_rng(0).normal(size=(5, WEIGHT_COUNT))
    expected = Here(judges).costs(numbers, weights)
    decoders = Processes(judges, 2)
    try:
        assert (decoders.costs(numbers, weights) == expected).all()
        for number in list(decoders._executor._processes):
            os.kill(number, signal.SIGKILL)
        assert (decoders.costs(numbers, weights) == expected).all()
    finally:
        decoders.close()


def test_the_curve_is_the_same_whatever_the_number_of_workers(tmp_path: Path) -> None:
    train(tmp_path / "alone", TINY)
    train(tmp_path / "helped", replace(TINY, workers=2))
    assert curve(tmp_path / "alone") == curve(tmp_path / "helped")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 5.0))
def test_a_cluster_has_the_bandwidth_that_its_comm_ratio_asks_for(seed: int, ratio: float) -> None:
    clusters = Clusters(devices=(3,), unequal_share=0.0, comm_ratio=(ratio, ratio))
    problem = draw_pool(seed, 1, 80, ["layered"], clusters)[0].judge.problem
    graph = problem.graph
    sent = graph.output_bytes[np.diff(graph.successor_start) > 0].sum()
    bandwidth = problem.cluster.links[0].bandwidth_bytes_per_s
    assert sent / bandwidth == pytest.approx(ratio * graph.costs_for("fast").sum())


def test_a_pool_drawn_with_the_defaults_is_what_it_was() -> None:
    first, second = draw_pool(5, 4, 80), draw_pool(5, 4, 80, clusters=Clusters())
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.summary == theirs.summary).all()


def test_the_command_takes_a_configuration_and_options_go_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(toml(TINY))
    out = tmp_path / "policies" / "tiny"
    out.parent.mkdir()
    arguments = ["train", "--config", str(config), "--out", str(out), "--families", "grid"]
    assert main([*arguments, "--decodes", "8", "--first-seed", "3"]) == 0
    assert "seed 3 of 1" in capsys.readouterr().out
    card = load(str(out)).card
    assert card["trained_on"]["families"] == ["grid"]
    assert card["seeds"][0]["decodes"] == 8
    assert sorted(path.name for path in out.parent.iterdir() if path.is_file()) == [
        "tiny.csv",
        "tiny.json",
        "tiny.safetensors",
    ]


def test_python_trains_by_the_same_configuration(tmp_path: Path) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(toml(TINY))
    policy = placer.train(tmp_path / "tiny", config, seeds=2, families=["grid"])
    assert policy.name == "tiny"
    assert len(policy.card["seeds"]) == 2
    assert policy.card["trained_on"]["families"] == ["grid"]
    config.write_text(toml(replace(TINY, algorithm="maskable-ppo")))
    with pytest.raises(ValueError, match="op by op"):
        placer.train(tmp_path / "tiny", config)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--decodes", "0"], "above 0"),
        (["--decodes", "10", "--seconds", "1"], "give one of them"),
        (["--workers", "2", "--ray"], "not both"),
        (["--families", "layred"], "layered"),
        (["--device", "cuda"], "no such device"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["train", "--out", str(tmp_path / "tiny"), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_tensorboard_has_the_curve_where_it_is_installed(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path / "tiny", TINY)
    events = accumulator.EventAccumulator(str(tmp_path / "tiny.tensorboard" / "seed-0"))
    events.Reload()
    told = [(event.step, event.value) for event in events.Scalars("mean_ratio")]
    rows = curve(tmp_path / "tiny")
    assert [step for step, _ in told] == [int(row["decodes"]) for row in rows]
    assert [value for _, value in told] == pytest.approx([float(r["mean_ratio"]) for r in rows])


def test_evolved_weights_are_no_worse_than_those_it_began_with() -> None:
    pool = draw_pool(5, 4, 80)
    decoders = Here([item.judge for item in pool])
    numbers = np.arange(4)
    actions = evolved_actions(decoders, numbers, Imitation(graphs=4, decodes=60), 0, lambda _: None)
    assert np.abs(actions).max() <= 1.0
    heft = decoders.costs(numbers, np.tile(HEFT, (4, 1)))
    found = decoders.costs(numbers, weights_of(actions))
    assert (found <= heft * 1.02).all()  # actions are of single precision
    assert found.sum() < heft.sum()


def test_a_reference_model_is_drawn_with_costs_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MODELS", {"dlrm": reference.MODELS["dlrm"]})
    small, large = (
        draw_pool(1, 2, max_ops, ["reference"])[0].judge.problem for max_ops in (100, 400)
    )
    assert small.op_count <= 100 < large.op_count <= 400
    assert (large.cost_ns >= 5000).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(reference.MODELS))
def test_every_reference_model_is_extracted_without_memory(name: str) -> None:
    graph = reference.extracted(name)
    assert len(graph) > 50
    assert {node["phase"] for _, node in graph.nodes(data=True)} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("spent_s", "share", "told"),
    [
        (60.0, 0.25, ", 3 min left"),
        (10.0, 0.5, ", 10 s left"),
        (3600.0, 0.2, ", 4.0 h left"),
        (1.0, 0.0, ""),
        (5.0, 1.0, ", 0 s left"),
    ],
)
def test_what_is_left_is_told_in_a_fitting_unit(spent_s: float, share: float, told: str) -> None:
    assert time_left(spent_s, share) == told
