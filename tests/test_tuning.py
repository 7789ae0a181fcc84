from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_problems import random_problem
from tiny_training import TINY

from envs.backend import StepResult, measured_result
from envs.executor.worker_error import WorkerError
from envs.fitting import scaled
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.schedule import run_order
from placer.cli.main import main
from placer.policies import load
from placer.policies.measuring import Fitted
from placer.policies.params_env import ParamsBatch
from placer.policies.pool import exercise
from placer.policies.training.learner import Learner
from placer.policies.training.networks import exported, imported
from placer.policies.tuned import Tuning
from placer.policies.tuner import Tuner
from placer.report.progress import Silent
from placer.search.budget import Budget
from placer.search.decoder import HEFT

torch.set_num_threads(1)

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
MODEL = """
import torch
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        self.right = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))

    def forward(self, x):
        return (self.left(x) * self.right(x)).sum()

def build():
    torch.manual_seed(0)
    return Towers(), torch.randn(128, 256)
"""


def test_a_network_that_begins_with_a_policy_says_what_the_policy_says() -> None:
    policy = load("generalist")
    item = exercise(random_problem(2, ops=30, devices=3))
    scale = (policy.feature_mean, policy.feature_deviation)
    layers = tuple(len(bias) for _, bias in policy.layers[:-1])
    config = replace(TINY, ppo=replace(TINY.ppo, layers=layers))
    learner = Learner(config, 0, ParamsBatch([item], 4, 0, scale=scale))
    imported(learner.model.policy, policy)
    ours = exported(learner.model.policy, "", *scale).weights(item.summary)
    for one, other in zip(ours, policy.weights(item.summary), strict=True):
        assert (one == other).all()


def test_a_fitted_simulator_costs_relative_to_the_known_plan() -> None:
    item = exercise(random_problem(2, ops=30, devices=3))
    known = replace(item.known[-1], step_ns=7 * item.known[-1].step_ns)
    costs = Fitted(item.judge, known).costs(np.zeros(1, np.int64), HEFT[None])
    heft = item.judge.decoded(HEFT[None])[2][0]
    assert costs[0] == pytest.approx(7 * heft, rel=1e-6)


def test_what_no_plan_fits_is_not_said_to_fit_nowhere() -> None:
    resident = int(random_problem(1, ops=24).graph.resident_bytes.sum())
    problem = random_problem(1, ops=24, devices=3, memory_bytes=int(0.45 * resident))
    tuning = Tuning(budget=Budget(evaluations=20))
    rig: Any = None  # nothing is run
    tuner = Tuner(problem, rig, load("generalist"), "mine", tuning, Silent())
    with pytest.raises(ValueError, match="no plan that was found"):
        tuner.tuned()


class Machine:
    """A backend whose steps follow a simulator with other factors, with noise."""

    interrupted = False

    def __init__(self, problem: Problem, factors: Sequence[float], failing: bool = False) -> None:
        self.simulator = Simulator(scaled(problem, np.log(factors)), memory=False)
        self.failing = failing
        self.rng = np.random.default_rng(0)

    def evaluate(self, placements: Sequence[Placement], progress: Any = None) -> list[StepResult]:
        """Return nine rounds with 0.1 % noise."""
        if self.failing:
            nothing = np.array([])
            failed = Measurement(wall_s=nothing, cpu_clock_s=nothing, failure="it died")
            return [measured_result(failed, {})] * len(placements)
        steps = [self.simulator.step_ns(*own.arrays())[0] / 1e9 for own in placements]
        runs = [step * self.rng.normal(1.0, 1e-3, 9) for step in steps]
        return [measured_result(Measurement(wall_s=run, cpu_clock_s=run), {}) for run in runs]

    def close(self) -> None:
        """Do nothing."""


def tuner_on(
    problem: Problem, factors: Sequence[float], *, failing: bool = False
) -> tuple[Tuner, Machine]:
    """Return a tuner for a machine that differs from the simulator's assumptions."""
    machine = Machine(problem, factors, failing)

    class Rig:
        order = staticmethod(lambda problem, schedule: run_order(problem, schedule.start_ns))
        backend = staticmethod(lambda problem, predicted_s: machine)

    tuning = Tuning(rounds=2, plans=4, decodes=200, budget=Budget(evaluations=300))
    rig: Any = Rig()
    return Tuner(problem, rig, load("generalist"), "tuned", tuning, Silent()), machine


def test_tuning_finds_what_a_machine_prefers_that_the_simulator_does_not_know() -> None:
    problem = random_problem(3, ops=60, devices=3)
    tuner, _ = tuner_on(problem, (1.0, 3.0, 3.0, 1.0))
    found = tuner.tuned()
    assert found.best.step_s < 0.8 * found.simulated.step_s
    first, second, *_ = found.policy.card["simulator_factors"].values()
    assert second / first == pytest.approx(3.0, rel=0.1)
    assert found.placement.measured is not None
    assert found.placement.measured["step_s"] == found.best.step_s
    assert found.policy.others is tuner.policy.others


def test_where_the_simulator_is_right_it_fits_what_was_measured() -> None:
    problem = random_problem(4, ops=40, devices=2)
    tuner, _ = tuner_on(problem, (1.0, 1.0, 1.0))
    found = tuner.tuned()
    assert all(row["error_after_fit"] < 0.01 for row in found.policy.card["rounds"])


def test_a_model_that_cannot_be_run_is_told_with_the_reason() -> None:
    tuner, _ = tuner_on(random_problem(4, ops=20, devices=2), (1.0, 1.0, 1.0), failing=True)
    with pytest.raises(WorkerError, match="cannot be run: it died"):
        tuner.tuned()


@two_cores
@pytest.mark.slow
def test_tuning_by_measured_steps_writes_a_policy_and_its_placement(
    tmp_path: Path,
) -> None:
    (tmp_path / "towers.py").write_text(MODEL)
    out = tmp_path / "tuned"
    arguments = ["train", "--reward", "measured", "--target", f"{tmp_path / 'towers.py'}:build"]
    arguments += ["--devices", "core:0,core:1", "--rounds", "2", "--plans", "3", "--budget", "200e"]
    assert main([*arguments, "--out", str(out)]) == 0
    policy = load(str(out))
    card = policy.card
    assert card["tuned_from"] == "generalist"
    assert set(card["simulator_factors"]) == {"core:0", "core:1", "transfers"}
    placement = Placement.load(tmp_path / "tuned.placement.json")
    assert placement.measured is not None
    assert placement.measured["step_s"] == card["best"]["step_s"]
    assert card == json.loads((tmp_path / "tuned.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--reward", "measured"], "give --target"),
        (["--target", "model.py:build"], "--target says nothing with --reward simulated"),
        (["--reward", "measured", "--target", "x.py:f", "--seeds", "2"], "--seeds says nothing"),
        (["--reward", "measured", "--target", "graph.json"], "cannot be run"),
        (["--reward", "measured", "--target", "x.py:f", "--plans", "1"], "of 2 or more"),
        (["--reward", "measured", "--target", "x.py:f", "--budget", "1x"], "1x"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["train", "--out", str(tmp_path / "tuned"), *arguments]) == 2
    assert told in capsys.readouterr().err
