"""Training with measured step times as reward."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from envs.executors.cores.errors import WorkerError
from envs.placement import Placement
from envs.problem import Floats, Ints, Problem
from envs.simulator import Simulator
from envs.simulator.schedule import issue_order
from graphs.extract import Workload
from placer.cli.main import main
from placer.policies import load
from placer.policies.measured_decoders import MeasuredDecoders, OnThisMachine
from placer.policies.pool import CANNOT_RUN, exercise
from placer.policies.rewards import WORST_REWARD
from placer.policies.scheduler_env import SchedulerEnv
from placer.policies.training import Length, config_of, train
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from tests.helpers.measured_machine import Machine, Order
from tests.helpers.random_problems import random_problem

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    return model, (torch.randn(128, 256), torch.randn(128, 256)), nn.functional.mse_loss
"""


def decoders_on(
    factors: Sequence[float],
    problem: Problem | None = None,
    *,
    spoilt: Callable[[Placement], bool] | None = None,
    taken: float | None = None,
) -> tuple[MeasuredDecoders, Machine]:
    """Return decoders on a machine; placements that are spoilt end the others, or take no time."""
    problem = problem or random_problem(3, ops=60, devices=len(factors))
    machine, order = Machine(problem, factors), Order()
    machine.spoilt = spoilt or machine.spoilt
    if taken is not None:
        machine.times_spoilt = lambda run: np.full_like(run, taken)
    devices = OnThisMachine(machine)  # type: ignore[arg-type]
    return MeasuredDecoders(exercise(problem, "measured"), order, devices), machine  # type: ignore[arg-type]


def in_simulated_order(problem: Problem, devices: Ints, priority: Floats) -> tuple[Ints, Floats]:
    """Return a placement that runs its ops in the order in which the simulator would."""
    order = issue_order(problem, Simulator(problem).run(devices, priority))
    ranks = np.zeros(len(devices))
    ranks[order] = -np.arange(len(devices))
    return devices, ranks


def test_costs_are_those_of_the_machine_and_not_of_the_simulator() -> None:
    decoders, machine = decoders_on((1.0, 3.0, 3.0))
    weights = HEFT + np.random.default_rng(0).normal(size=(5, WEIGHT_COUNT))
    costs = decoders.costs(np.zeros(5, np.int64), weights)
    devices, priority, simulated = decoders.evaluator.decode(weights)
    problem = decoders.evaluator.problem
    steps = np.array(
        [
            machine.simulator.step_ns(*in_simulated_order(problem, own, rank))[0]
            for own, rank in zip(devices, priority, strict=True)
        ]
    )
    assert costs == pytest.approx(steps, rel=0.005)
    assert (steps > 1.2 * simulated).any()
    known = {c.name: c.step_ns for c in decoders.item.known}
    assert min(known.values()) == decoders.item.reference_ns


def test_a_placement_is_measured_once_beside_the_reference() -> None:
    decoders, machine = decoders_on((1.0, 1.0))
    weights = HEFT + np.random.default_rng(0).normal(size=(40, WEIGHT_COUNT))
    machine.batches.clear()
    first = decoders.costs(np.zeros(40, np.int64), weights)
    assert len(machine.batches) > 1
    assert max(machine.batches) <= 17
    ran = list(machine.batches)
    assert (decoders.costs(np.zeros(40, np.int64), weights) == first).all()
    assert machine.batches == ran


def test_a_machine_that_fails_is_an_error_with_the_reason() -> None:
    decoders, machine = decoders_on((1.0, 1.0))
    machine.broken = True
    weights = HEFT + np.random.default_rng(1).normal(size=(3, WEIGHT_COUNT))
    with pytest.raises(WorkerError, match="cannot be run: it died"):
        decoders.costs(np.zeros(3, np.int64), weights)


@pytest.mark.parametrize("taken", [None, np.nan])
def test_a_placement_that_fails_or_has_no_time_is_worst_and_the_others_count(
    taken: float | None,
) -> None:
    decoders, machine = decoders_on((1.0, 1.0))
    weights = HEFT + np.random.default_rng(1).normal(size=(6, WEIGHT_COUNT))
    expected = decoders_on((1.0, 1.0))[0].costs(np.zeros(6, np.int64), weights)
    devices = decoders.evaluator.decode(weights)[0]
    bad = devices[2].tolist()
    machine.spoilt = lambda own: own.arrays()[0].tolist() == bad
    if taken is not None:  # without, it takes all devices down with it
        machine.times_spoilt = lambda run: np.full_like(run, taken)
    costs = decoders.costs(np.zeros(6, np.int64), weights)
    alike = (devices == devices[2]).all(axis=1)
    assert 1 <= alike.sum() < 6
    assert (costs[alike] == decoders.item.reference_ns * CANNOT_RUN).all()
    assert costs[~alike] == pytest.approx(expected[~alike], rel=0.01)


@pytest.mark.parametrize("taken", [None, np.nan])
@pytest.mark.parametrize("which", ["the best", "another"])
def test_heuristics_that_fail_or_have_no_time_are_left_out(which: str, taken: float | None) -> None:
    expected, _ = decoders_on((1.0, 1.0))
    ranked = sorted(expected.item.known, key=lambda c: c.step_ns)
    bad = ranked[0] if which == "the best" else ranked[-1]
    decoders, _ = decoders_on(
        (1.0, 1.0),
        spoilt=lambda own: own.arrays()[0].tolist() == bad.devices.tolist(),
        taken=taken,
    )
    found = {c.name: c.step_ns for c in decoders.item.known}
    for candidate in expected.item.known:
        if candidate.devices.tolist() == bad.devices.tolist():
            assert found[candidate.name] == decoders.item.reference_ns * CANNOT_RUN
        else:
            assert found[candidate.name] == pytest.approx(candidate.step_ns, rel=0.01)
    assert decoders.item.reference_ns == min(found.values())


@pytest.mark.parametrize("taken", [None, np.nan])
def test_without_a_heuristic_that_can_be_run_there_is_no_training(taken: float | None) -> None:
    with pytest.raises(WorkerError, match="cannot be run: it"):
        decoders_on((1.0, 1.0), spoilt=lambda _: True, taken=taken)


def test_a_reference_that_has_no_time_once_spoils_no_placement() -> None:
    decoders, machine = decoders_on((1.0, 1.0))
    weights = HEFT + np.random.default_rng(1).normal(size=(6, WEIGHT_COUNT))
    expected = decoders_on((1.0, 1.0))[0].costs(np.zeros(6, np.int64), weights)
    best, groups = decoders._reference.arrays()[0].tolist(), len(machine.batches)
    machine.spoilt = lambda own: (
        own.arrays()[0].tolist() == best and len(machine.batches) == groups + 1
    )
    machine.times_spoilt = lambda run: np.full_like(run, np.nan)
    costs = decoders.costs(np.zeros(6, np.int64), weights)
    assert costs == pytest.approx(expected, rel=0.01)


def test_a_lone_placement_that_takes_the_devices_down_is_worst() -> None:
    decoders, machine = decoders_on((1.0, 1.0))
    best = decoders._reference.arrays()[0].tolist()
    machine.spoilt = lambda own: own.arrays()[0].tolist() != best
    weights = HEFT + np.random.default_rng(1).normal(size=(1, WEIGHT_COUNT))
    assert decoders.evaluator.decode(weights)[0][0].tolist() != best
    costs = decoders.costs(np.zeros(1, np.int64), weights)
    assert costs.tolist() == [decoders.item.reference_ns * CANNOT_RUN]


def test_a_training_goes_on_after_failed_measurements_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoders, machine = decoders_on((1.0, 1.0))
    best = decoders._reference.arrays()[0].tolist()
    machine.spoilt = lambda own: own.arrays()[0].tolist() != best
    machine.times_spoilt = lambda run: np.full_like(run, np.nan)
    monkeypatch.setattr(MeasuredDecoders, "of", lambda *_: decoders)
    monkeypatch.setattr("placer.cli.train._measured", lambda *_: (None, None))
    out = tmp_path / "tuned"
    command = ["train", "--backend", "measured", "--decodes", "16", "--out", str(out)]
    assert main(command) == 0
    [row] = load(str(out)).card["seeds"]
    assert 0 < row["failed"] <= row["decodes"] == 16
    assert f"{row['failed']} of 16 decoded placements could not be run" in capsys.readouterr().out
    with (tmp_path / "tuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(line["failed"]) for line in rows) == row["failed"]
    assert all(line["mean_ratio"] == "" or float(line["mean_ratio"]) < CANNOT_RUN for line in rows)


def test_a_model_that_no_heuristic_fits_is_refused() -> None:
    resident = int(random_problem(1, ops=24).graph.resident_bytes.sum())
    tight = random_problem(1, ops=24, devices=3, memory_bytes=resident // 10)
    with pytest.raises(ValueError, match="no heuristic placement fits"):
        decoders_on((1.0, 1.0, 1.0), tight)


@pytest.mark.slow
def test_the_policy_learns_what_the_machine_prefers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders, _ = decoders_on((1.0, 3.0, 3.0))
    monkeypatch.setattr(MeasuredDecoders, "of", lambda *_: decoders)
    config = config_of(backend="measured", length=Length(decodes=320))
    measured: Any = (None, None)
    card = train(tmp_path / "tuned", config, measured=measured)
    policy = load(str(tmp_path / "tuned"))
    assert policy.card == card == json.loads((tmp_path / "tuned.json").read_text())
    assert card["scores_are"].endswith("measured")
    assert card["trained_on"]["devices"] == list(decoders.evaluator.problem.cluster.names)
    start = load("generalist")
    before, after = (own.weights(decoders.item.summary)[0] for own in (start, policy))
    costs = decoders.costs(np.zeros(2, np.int64), np.stack([before, after]))
    assert costs[1] < costs[0]
    ratio = round(costs[1] / decoders.item.reference_ns, 4)
    assert card["seeds"][0]["validation"]["mean"] == ratio


def test_a_model_is_needed_exactly_with_measured_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend measured needs a model"):
        train(tmp_path / "tuned", config_of(backend="measured"))
    measured: Any = (None, None)
    with pytest.raises(ValueError, match="backend simulated draws graphs"):
        train(tmp_path / "tuned", config_of(seeds=1), measured=measured)


@two_cores
@pytest.mark.slow
def test_training_by_measured_steps_on_two_cores_is_stopped_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layers.py").write_text(MODEL)
    out = tmp_path / "tuned"
    command = ["train", "--backend", "measured", "--target", f"{tmp_path / 'layers.py'}:build"]
    command += ["--devices", "core:0,core:1", "--decodes", "24", "--out", str(out)]
    costs, calls = MeasuredDecoders.costs, []

    def stopped(own: MeasuredDecoders, numbers: Any, weights: Any) -> Any:
        calls.append(len(weights))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return costs(own, numbers, weights)

    with monkeypatch.context() as patched:
        patched.setattr(MeasuredDecoders, "costs", stopped)
        assert main(command) != 0
    assert "goes on from the last checkpoint" in capsys.readouterr().err
    assert main(command) == 0
    card = load(str(out)).card
    assert card["config"]["start"] == "generalist"
    assert card["trained_on"]["devices"] == ["core:0", "core:1"]
    with (tmp_path / "tuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["decodes"]) for row in rows] == [8, 16, 24]
    assert all(0.1 < float(row["mean_ratio"]) < 100 for row in rows)
    assert not (tmp_path / "tuned.checkpoint").exists()


@two_cores
@pytest.mark.slow
def test_the_scheduler_environment_measures_its_steps() -> None:
    made = gym.make(
        "placer/Scheduler-v0",
        workload=Workload.of(torch.nn.Linear(256, 256), torch.randn(64, 256), training=False),
        cluster="core:0,core:1",
        backend="measured",
    )
    environment = made.unwrapped
    assert isinstance(environment, SchedulerEnv)
    made.reset(seed=0)
    _, reward, ended, _, info = made.step(np.zeros(WEIGHT_COUNT, np.float32))
    assert ended
    expected = max(-10.0 * np.log(info["step_ns"] / info["reference_ns"]), WORST_REWARD)
    assert reward == pytest.approx(expected, abs=1e-3)
    made.close()
