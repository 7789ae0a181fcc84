"""The configuration of a training, from a file, options and Python."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import placer
from envs.simulator import OVERFULL_NS
from placer.cli.main import main
from placer.policies import load
from placer.policies.decoders import InProcess
from placer.policies.evaluation import Suite
from placer.policies.pool import Clusters, draw_exercise
from placer.policies.records import Within, differences, plain, record
from placer.policies.rewards import relative_rewards
from placer.policies.training import config_of, load_config
from placer.policies.training.config import Length, Ppo, Stage, TrainingConfig
from tests.helpers.folders import ROOT
from tests.helpers.tiny_training import TINY, TWO_STAGES, toml

CONFIGS = sorted((ROOT / "trained_policies").glob("*.toml"))


def test_a_configuration_without_anything_is_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "default.toml"
    path.write_text('format = "placer-training/1"\n')
    assert load_config(path) == TrainingConfig()


def test_a_configuration_that_is_written_reads_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "two-stages.toml"
    path.write_text(toml(TWO_STAGES))
    assert load_config(path) == TWO_STAGES
    assert record(TrainingConfig, plain(TWO_STAGES)) == TWO_STAGES


@pytest.mark.parametrize("backend", [None, "measured"])
def test_what_a_file_leaves_out_is_as_in_the_default_of_its_backend(
    backend: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "measured.toml"
    named = 'backend = "measured"\n' if backend is None else ""
    path.write_text(f'format = "placer-training/1"\n{named}seeds = 2\n[ppo]\nepochs = 3\n')
    default = config_of(backend="measured")
    expected = replace(default, seeds=2, ppo=replace(default.ppo, epochs=3))
    assert config_of(path, backend=backend) == expected
    path.write_text(path.read_text() + "[length]\nseconds = 5.0\n")
    assert config_of(path, backend=backend) == replace(expected, length=Length(seconds=5.0))


def test_measured_steps_may_be_those_of_a_cluster() -> None:
    config = config_of(backend="measured", workers="ray://node7:6379")
    assert config.ray_address == "node7:6379"
    assert config_of(backend="measured").ray_address is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "format is missing"),
        ('format = "placer-training/2"', "format is 'placer-training/2'"),
        ("[ppo]\nlearning_rat = 1", "unknown key ppo.learning_rat"),
        (
            "[[stage]]\n[[stage]]\nclusters = { devices = [1] }",
            r"stage\[1\].clusters.devices\[0\] is 1, not within 2 ..",
        ),
        ("[[stage]]\nfamilies = ['layred']", r"stage\[0\]: there is no family 'layred'"),
        ("[length]\ndecodes = 10\nseconds = 1.0", "length: .* either decodes or seconds"),
        ("seeds = 1.5", "seeds is 1.5, not a whole number"),
        ('workers = "rat"', "workers is 'rat'"),
        ("[ppo]\nlayers = 64", "ppo.layers is 64, not a list"),
        ("stage = []", "number of items of stage is 0"),
        ('backend = "measured"\nworkers = 2', "workers: with backend measured"),
        ('backend = "measured"\n[[stage]]\ngraphs = 2', "stage: with backend measured"),
        ("seeds = = 2", "line 2"),
        ("[ppo]\nenvironments = 16384\nsteps = 65", "ppo: environments x steps is 1064960, not"),
        ("[[stage]]\ngraphs = 100000\nmax_ops = 1001", "graphs x max_ops is 100100000, not"),
        ("[ppo]\nlayers = [4, 4, 4, 4, 4, 4, 4, 4, 4]", "number of items of ppo.layers is 9"),
        ("[[stage]]\n[stage.clusters]\ncomm_ratio = [2.0, 1.0]", "the smaller one comes first"),
        ("[ppo]\nbest_of = 4\nenvironments = 24", "ppo: environments is 24, .* groups of 16"),
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


def numbers(annotation: Any, where: str) -> Iterator[tuple[str, Within | None]]:
    """Yield every number that a value of a type may hold, with its range."""
    arguments = get_args(annotation)
    if is_dataclass(annotation):
        for name, own in get_type_hints(annotation, include_extras=True).items():
            yield from numbers(own, f"{where}.{name}" if where else name)
    elif annotation in (int, float):
        yield where, None
    elif get_origin(annotation) is Annotated and arguments[0] in (int, float):
        yield where, arguments[1]
    elif get_origin(annotation) is Annotated:
        yield from numbers(arguments[0], where)
    elif get_origin(annotation) is tuple:
        yield from numbers(arguments[0], f"{where}[0]")
    else:
        for own in arguments if get_origin(annotation) in (Union, UnionType) else ():
            yield from numbers(own, where)


def nested(path: str, value: object) -> dict[str, Any]:
    """Return the content of a file with this value at a path."""
    for key in reversed(path.replace("[0]", ".0").split(".")):
        value = [value, value] if key == "0" else {key: value}
    assert isinstance(value, dict)
    return value


NUMBERS = [
    *((TrainingConfig, "format", path, own) for path, own in numbers(TrainingConfig, "")),
    *((Suite, "name", path, own) for path, own in numbers(Suite, "")),
]


@pytest.mark.parametrize(("kind", "required", "path", "allowed"), NUMBERS)
def test_every_number_has_a_range_and_is_refused_beyond_it(
    kind: type[object], required: str, path: str, allowed: Within | None
) -> None:
    assert allowed is not None
    outside = [allowed.low - 1, 2 * abs(allowed.high) + 1, -(2**70), 2**70, 1e300]
    others = [-math.inf, math.inf, math.nan, 10**400, "1", True, [], {}]
    for number, value in enumerate([*outside, *others]):
        given = {required: "placer-training/1"} | nested(path, value)
        with pytest.raises(ValueError, match=re.escape(path)) as caught:
            record(kind, given)
        if number < len(outside):
            assert f"{path} is " in str(caught.value)


@pytest.mark.parametrize(
    "clusters",
    [
        Clusters(devices=(2,), comm_ratio=(1e6, 1e6)),
        Clusters(devices=(2,), comm_ratio=(1e-6, 1e-6)),
        Clusters(devices=(2,), bandwidth_bytes_per_s=(1.0, 1.0), latencies_s=(1.0,)),
        Clusters(devices=(70,), bandwidth_bytes_per_s=(1e15, 1e15), latencies_s=(0.0,)),
    ],
)
def test_clusters_at_the_ends_of_their_ranges_can_be_trained_on(clusters: Clusters) -> None:
    drawn = draw_exercise(np.random.default_rng(0), "grid", 80, clusters)
    assert np.isfinite(drawn.summary).all()
    assert 1 <= drawn.reference_ns < OVERFULL_NS
    rewards = relative_rewards(InProcess([drawn.evaluator]), np.array([drawn.reference_ns]), 0.2)
    assert np.isfinite(rewards.expected).all()


def test_the_shipped_configurations_are_read() -> None:
    configs = {path.stem: load_config(path) for path in CONFIGS if path.stem != "suites"}
    assert configs.keys() >= {"generalist", "synthetic-only"}
    families = {family for stage in configs["synthetic-only"].stage for family in stage.families}
    assert families <= {"fork-join", "grid", "cells", "recurrence", "sequence"}


def test_differences_say_every_path_that_changed() -> None:
    before = plain(TINY)
    now = plain(replace(TINY, seeds=2, ppo=replace(TINY.ppo, layers=(8, 8)), stage=(Stage(),)))
    assert differences(before, before) == []
    changes = differences(before, now)
    assert "seeds was 1 and is 2 now" in changes
    assert "ppo.layers was [8] and is [8, 8] now" in changes
    assert any(text.startswith("stage[0].max_ops was 80") for text in changes)


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


def test_options_of_the_command_override_the_configuration(
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--decodes", "10", "--seconds", "1"], "give one of them"),
        (["--device", "cuda"], "no such device"),
        (["--start", "nobody"], "there is no policy 'nobody'"),
        (["--backend", "measured"], "give --target"),
        (["--backend", "measured", "--target", "graph.json"], "cannot be run"),
        (["--backend", "measured", "--target", "x.py:f", "--families", "grid"], "leave it out"),
        (["--target", "model.py:build"], "--target needs --backend measured"),
    ],
)
def test_the_command_refuses_contradicting_or_unknown_arguments(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", "--out", str(tmp_path / "tiny"), *arguments]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FloatingPointError("it diverged"), "it diverged"),
        (KeyboardInterrupt(), "before there was anything to keep"),
        (OSError(28, "No space left on device", "x"), "o space left"),
    ],
)
def test_a_training_that_fails_ends_with_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    message: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("placer.policies.training.train", fail)
    assert main(["train", "--out", str(tmp_path / "tiny")]) == 1
    assert message in capsys.readouterr().err
