"""The benchmark of measured steps: the placements that it chooses, and that all parts run."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.record import Effort
from benchmarks.steps import loops, orders, parts, predictions, speeds
from benchmarks.steps.answers import Answer, Answers
from envs.placement import Placement
from envs.problem import toy_problem
from envs.simulator import Simulated

MODEL = "two towers, training"


def test_ranks_are_correlated_as_by_hand() -> None:
    rising = np.array([1.0, 2.0, 3.0, 4.0])
    assert orders.spearman(rising, rising**2) == 1.0
    assert orders.spearman(rising, -rising) == -1.0
    # Squared differences of ranks 0, 0, 1, 1: 1 - 6 * 2 / (4 * 15).
    assert orders.spearman(rising, np.array([10.0, 20.0, 40.0, 30.0])) == pytest.approx(0.8)


def test_placements_from_random_to_good_are_evenly_spaced_and_predicted() -> None:
    problem = toy_problem()
    priority = -np.arange(problem.op_count, dtype=float)
    towers = np.array([0] + 6 * [0] + 6 * [1] + [0])
    good = Placement.of(problem.graph, problem.cluster, towers, priority)
    placed = SimpleNamespace(placement=good)
    answer = cast(Answer, SimpleNamespace(problem=problem, placed=placed))
    placements, predicted_s = orders.between_random_and_good(answer, 6)
    first, *results = Simulated(problem).evaluate([good, *placements])
    assert predicted_s[0] <= first.step_s
    assert [each.step_s for each in results] == pytest.approx(predicted_s)
    steps = np.diff(np.log(predicted_s))
    assert (steps > 0).all()
    assert steps.max() < 2 * steps.mean()


def test_each_part_of_each_model_has_a_name() -> None:
    names = list(parts(Effort()))
    assert len(names) == 13 * 5 + 1
    assert f"loop, {MODEL}" in names
    assert [name for name in parts(Effort("quick")) if MODEL not in name] == ["speed of all"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_parts_are_measured() -> None:
    answers, found, faster = Answers("50e"), cast(dict[str, Any], {}), cast(dict[str, float], {})
    tables = [
        predictions.predicted(answers, MODEL, 1, found),
        predictions.memory(answers, MODEL, found),
        orders.order(answers, MODEL, 3, found),
        speeds.speed(answers, MODEL, 2, faster, found),
        loops.loop(answers, MODEL, 1, found),
    ]
    assert all(len(table.rows[0]) == len(table.columns) for table in tables)
    assert faster.keys() == {MODEL}
    assert all(ratio > 0 for ratio in found["unplaced_over_placed"])
    mean = speeds.mean_speed(faster, found)
    assert mean is not None
    assert found["geometric_mean"] == pytest.approx(faster[MODEL])
    assert speeds.mean_speed({}, found) is None
