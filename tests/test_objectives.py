"""Objectives other than the step of one device, from the command line to the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from random_problems import random_problem

from envs.max_load import max_load_ns
from envs.placement import Placement
from envs.simulator import Simulated
from placer.cli.main import main
from placer.objectives import Objective
from placer.placers.portfolio import Portfolio
from placer.search.budget import Budget

Files = Callable[..., tuple[Path, Path]]


def optimized(files: Files, out: Path, *options: str) -> list[str]:
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "2000e"]
    assert main([*arguments, "--out", str(out), "--json", *options]) == 0
    return ["simulate", str(graph), "--cluster", str(cluster), "--placement", str(out), "--json"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--objective", "max-load"], "max_load_s"),
        (["--objective", "throughput", "--micro-batches", "4"], "period_s"),
        (["--micro-batches", "4"], "step_s"),
    ],
)
def test_what_is_predicted_is_what_simulate_says(
    files: Files,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    key: str,
) -> None:
    out = tmp_path / "placement.json"
    simulate = optimized(files, out, *options)
    found = json.loads(capsys.readouterr().out)
    assert main(simulate) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["micro_batches"] == found["micro_batches"]
    for name in ("step_s", key):
        assert said[name] == pytest.approx(found["predicted"][name], rel=0, abs=1e-15)
    assert found["lower_bound_s"] <= said[key] * (1 + 1e-9)
    assert found["speed_up"] >= 1.0
    assert json.loads(out.read_text())["objective"] == found["objective"]


def test_each_objective_is_smallest_where_it_was_asked_for(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for name in ("latency", "max-load"):
        simulate = optimized(files, tmp_path / "p.json", "--objective", name)
        capsys.readouterr()
        assert main(simulate) == 0
        said[name] = json.loads(capsys.readouterr().out)
    assert said["max-load"]["max_load_s"] < said["latency"]["max_load_s"]
    assert said["max-load"]["step_s"] > said["latency"]["step_s"]


def test_a_model_is_run_by_whole_steps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["optimize", "model.py:build", "--devices", "core:0"]
    assert main([*arguments, "--objective", "max-load"]) == 2
    assert "are for graph files" in capsys.readouterr().err
    assert main([*arguments, "--micro-batches", "2"]) == 2


@pytest.mark.parametrize(
    ("name", "micro_batches", "message"),
    [
        ("speed", 1, "objective is 'speed', not one of"),
        ("throughput", 1, "give 2 or more"),
        ("latency", 0, "micro_batches is 0"),
    ],
)
def test_objectives_that_mean_nothing_are_refused(
    name: str, micro_batches: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(name=name, micro_batches=micro_batches)


def test_a_full_device_has_its_own_reason_in_each_objective() -> None:
    problem = random_problem(0, ops=20, devices=2, memory_bytes=12_000_000)
    alone = Placement.of(problem.graph, problem.cluster, np.zeros(20, np.int32), np.zeros(20))
    for name in ("latency", "max-load"):
        said = Objective(name=name).predict(Simulated(problem), alone)
        assert said.value_s == np.inf
        assert "device:0 needs" in said.why
        assert said.times_s["step_s"] > 0


def test_plans_for_micro_batches_name_every_op_once() -> None:
    problem = random_problem(1, ops=15, devices=3, groups=True)
    plans = Objective(micro_batches=3).search(problem, Budget(evaluations=200), 0, Portfolio())
    assert {plan.devices.shape for plan in plans} == {(15,)}
    assert len(set(max_load_ns(problem, np.array([plan.devices for plan in plans])))) > 1
