"""Training: checkpoints, log, workers, and reproducibility."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placer.policies import load, reference
from placer.policies.decoders import InProcess, Processes
from placer.policies.pool import Clusters, draw_pool
from placer.policies.records import record
from placer.policies.training import load_config, train
from placer.policies.training.config import TrainingConfig
from placer.policies.training.log import COLUMNS, Log
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from tests.helpers.processes import all_end, largest_file
from tests.helpers.tiny_training import TINY, TWO_STAGES, curve, toml


def test_training_writes_a_policy_with_every_seed_in_its_card(tmp_path: Path) -> None:
    out = tmp_path / "here" / "tiny"
    card = train(out, replace(TINY, seeds=2))
    policy = load(str(out))
    assert policy.card == card == json.loads((tmp_path / "here" / "tiny.json").read_text())
    assert [row["seed"] for row in policy.card["seeds"]] == [0, 1]
    assert policy.card["seed"] in (0, 1)
    assert policy.card["trained_on"]["families"] == ["layered"]
    assert policy.card["config"] == replace(TINY, seeds=2).essence()  # not where it was trained
    config = record(TrainingConfig, policy.card["config"])
    assert replace(config, checkpoint_rollouts=1) == replace(TINY, seeds=2)
    assert {"single", "HEFT", "ETF", "untrained, best of 16"} == set(policy.card["baselines"])
    assert not (tmp_path / "here" / "tiny.checkpoint").exists()
    rows = curve(out)  # a line for every rollout
    assert set(COLUMNS) == {*rows[0], "spent_s"}
    assert [int(row["decodes"]) for row in rows] == [8, 16, 24, 32] * 2
    assert [row["seed"] for row in rows] == ["0"] * 4 + ["1"] * 4


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from placer.policies.training import load_config, train

config, out, rollouts, workers = sys.argv[1:]
log = Path(out + ".csv")

def hear(share, text):
    if log.exists() and log.read_bytes().count(b"\\n") > int(rollouts):
        own = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        print(own, end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

train(Path(out), replace(load_config(Path(config)), workers=int(workers)), progress=hear)
"""


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_curve(tmp_path: Path) -> None:
    config = tmp_path / "two-stages.toml"
    config.write_text(toml(TWO_STAGES))
    train(tmp_path / "whole", load_config(config))
    killed = tmp_path / "killed"
    rollouts, workers = "75", "2"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(config), str(killed), rollouts, workers],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    own = [int(word) for word in done.stdout.split()]
    assert len(own) >= int(workers)
    assert all_end(own), "workers outlive who is killed"
    assert not (tmp_path / "killed.json").exists()
    train(killed, load_config(config))
    assert curve(killed) == curve(tmp_path / "whole")
    weights = [tmp_path / f"{name}.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_stages_that_no_memory_holds_together_are_refused(tmp_path: Path) -> None:
    stage = replace(TINY.stage[0], graphs=100_000, max_ops=1000)
    with pytest.raises(ValueError, match=r"10000\.0 GB"):
        train(tmp_path / "large", replace(TINY, stage=(stage,) * 100))


@pytest.mark.slow
def test_a_checkpoint_of_another_configuration_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    out = tmp_path / "tiny"
    stopped(out, TINY)
    checkpoint = out.with_name("tiny.checkpoint")
    assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match=r"ppo.epochs was 2 and is 3 now.*--fresh"):
        train(out, replace(TINY, ppo=replace(TINY.ppo, epochs=3)))
    train(out, replace(TINY, checkpoint_rollouts=2, workers=0))
    stopped(out, TINY)
    train(out, replace(TINY, seeds=2), fresh=True)
    assert len(curve(out)) == 8


def stopped(out: Path, config: TrainingConfig) -> None:
    """Train until there is a checkpoint, then stop as Ctrl-C does."""

    def stop(share: float, text: str) -> None:
        if out.with_name(f"{out.name}.checkpoint").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(out, config, progress=stop)


def with_a_bit_flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at:][1:]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("checkpoint", lambda _: b"", "it is no state file"),
        ("checkpoint", lambda _: b"nothing", "it is no state file"),
        ("checkpoint", lambda _: b"\x02\0\0\0\0\0\0\0{}", "the format is None"),
        ("checkpoint", lambda c: with_a_bit_flipped(c, c.index(b"has_uint32")), "it is damaged"),
        ("checkpoint", lambda c: with_a_bit_flipped(c, len(c) - 1), "damaged; give --fresh"),
        ("csv", lambda _: b"", "shorter"),
    ],
)
def test_a_damaged_checkpoint_or_log_is_refused(
    name: str, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    stopped(tmp_path / "tiny", TINY)
    path = tmp_path / f"tiny.{name}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"tiny\.{name}.*{message}"):
        train(tmp_path / "tiny", TINY)


@pytest.mark.slow
def test_processes_decode_to_the_same_costs_and_come_back_when_killed() -> None:
    pool = draw_pool(5, 3, 80)
    evaluators = [item.evaluator for item in pool]
    numbers = np.array([0, 2, 1, 1, 0])
    weights = HEFT + np.random.default_rng(0).normal(size=(5, WEIGHT_COUNT))
    expected = InProcess(evaluators).costs(numbers, weights)
    decoders = Processes(evaluators, 2)
    try:
        assert (decoders.costs(numbers, weights) == expected).all()
        for number in list(decoders._executor._processes):
            os.kill(number, signal.SIGKILL)
        assert (decoders.costs(numbers, weights) == expected).all()
    finally:
        decoders.close()


def test_processes_that_die_again_and_again_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def submit(self, *_: object) -> None:
            raise BrokenProcessPool("terminated abruptly")

        def shutdown(self, **_: object) -> None:
            pass

    monkeypatch.setattr("placer.policies.decoders.ProcessPoolExecutor", lambda *_, **__: Dying())
    sentence = r"processes that decode died 5 times: is there memory for 2 of them\? .*abruptly"
    with pytest.raises(OSError, match=sentence):
        Processes([], 2).costs(np.zeros(2, np.int64), np.ones((2, WEIGHT_COUNT)))


def test_processes_that_cannot_be_started_are_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("placer.policies.decoders.ProcessPoolExecutor", read_only)
    with pytest.raises(OSError, match=r"Read-only .*workers = 0"):
        Processes([], 2)


@pytest.mark.slow
def test_the_curve_is_the_same_whatever_the_number_of_workers(tmp_path: Path) -> None:
    train(tmp_path / "alone", TINY)
    train(tmp_path / "helped", replace(TINY, workers=2))
    assert curve(tmp_path / "alone") == curve(tmp_path / "helped")


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.1, 5.0))
def test_a_cluster_has_the_bandwidth_that_its_comm_ratio_asks_for(seed: int, ratio: float) -> None:
    clusters = Clusters(devices=(3,), unequal_share=0.0, comm_ratio=(ratio, ratio))
    problem = draw_pool(seed, 1, 80, ["layered"], clusters)[0].evaluator.problem
    graph = problem.graph
    sent = graph.output_bytes[np.diff(graph.successor_start) > 0].sum()
    bandwidth = problem.cluster.links[0].bandwidth_bytes_per_s
    assert sent / bandwidth == pytest.approx(ratio * graph.costs_for("fast").sum())


def test_the_log_is_on_the_disk_before_the_checkpoint_that_counts_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, synced, fsync = tmp_path / "tiny.csv", [], os.fsync
    log.touch()
    with log.open() as reader, monkeypatch.context() as patched:

        def noted(file: int) -> None:
            fsync(file)
            synced.append("log" if os.path.sameopenfile(file, reader.fileno()) else "checkpoint")

        patched.setattr(os, "fsync", noted)
        train(tmp_path / "tiny", TINY)
    rollouts = len(curve(tmp_path / "tiny"))
    assert synced[: 2 * rollouts] == ["log", "checkpoint"] * rollouts


def test_curves_of_a_training_before_are_gone_when_it_begins_anew(tmp_path: Path) -> None:
    old = tmp_path / "tiny.tensorboard" / "seed-7" / "events.out.tfevents.1"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    own = tmp_path / "tiny.tensorboard" / "notes.txt"
    own.write_text("what I think of it")
    train(tmp_path / "tiny", TINY, fresh=True)
    assert not old.parent.exists()
    assert own.exists()


def test_tensorboard_has_the_curve_where_it_is_installed(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path / "tiny", TINY)
    events = accumulator.EventAccumulator(str(tmp_path / "tiny.tensorboard" / "seed-0"))
    events.Reload()
    events_of = [(event.step, event.value) for event in events.Scalars("mean_ratio")]
    rows = curve(tmp_path / "tiny")
    assert [step for step, _ in events_of] == [int(row["decodes"]) for row in rows]
    assert [value for _, value in events_of] == pytest.approx(
        [float(r["mean_ratio"]) for r in rows]
    )


def write_until_it_fails(log: Log, rows: int) -> None:
    with log:
        for _ in range(rows):
            log.write(dict.fromkeys(COLUMNS, 1.0))


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path / "tiny")
    with largest_file(1000), pytest.raises(OSError, match="too large") as refusal:
        write_until_it_fails(log, rows=100)
    assert refusal.value.filename in (f"{tmp_path}/tiny.csv", f"{tmp_path}/tiny.tensorboard")


def test_curves_that_cannot_be_written_are_an_error_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = pytest.importorskip("tensorboard.summary.writer.record_writer")
    before = threading.excepthook  # pytest's, which makes the test of a failing thread fail

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.RecordWriter, "write", full)
    with pytest.raises(OSError, match="No space left") as refusal:
        write_until_it_fails(Log(tmp_path / "tiny"), rows=100)
    assert refusal.value.filename == f"{tmp_path}/tiny.tensorboard"
    assert threading.excepthook is before


@pytest.mark.slow
def test_a_reference_model_is_drawn_with_costs_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MODELS", {"dlrm": reference.MODELS["dlrm"]})
    small, large = (
        draw_pool(1, 2, max_ops, ["reference"])[0].evaluator.problem for max_ops in (100, 400)
    )
    assert small.op_count <= 100 < large.op_count <= 400
    assert (large.cost_ns >= 5000).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(reference.MODELS))
def test_every_reference_model_is_extracted_without_memory(name: str) -> None:
    graph = reference.extracted(name)
    assert len(graph) > 50
    assert {node["phase"] for _, node in graph.nodes(data=True)} == {"forward", "backward"}
