from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem

from envs.fitting import fitted, scaled
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator


def plans(problem: Problem, count: int) -> list[Placement]:
    """Return all single-device placements, then random ones."""
    rng = np.random.default_rng(0)
    devices = [np.full(problem.op_count, d) for d in range(problem.device_count)]
    devices += [
        rng.integers(problem.device_count, size=problem.op_count)
        for _ in range(count - len(devices))
    ]
    priority = -np.argsort(np.argsort(problem.graph.topological)).astype(float)
    return [Placement.of(problem.graph, problem.cluster, own, priority) for own in devices]


def steps_s(problem: Problem, placements: list[Placement]) -> list[float]:
    simulator = Simulator(problem, memory=False)
    return [float(simulator.step_ns(*own.arrays())[0]) / 1e9 for own in placements]


@pytest.mark.parametrize("seed", range(2))
def test_factors_that_made_the_measurements_are_found_again(seed: int) -> None:
    factors = [1.5, 0.7, 1.2, 1.6]
    problem = random_problem(seed, ops=30, devices=3)
    placements = plans(problem, 12)
    measured_s = steps_s(scaled(problem, np.log(factors)), placements)
    fit = fitted(problem, placements, measured_s)
    assert fit.error < 0.1 * fit.error_before
    assert fit.device_factors == pytest.approx(factors[:3], rel=0.05)
    assert steps_s(fit.problem, placements) == pytest.approx(measured_s, rel=0.05)


@settings(max_examples=15)
@given(st.integers(0, 50), st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6))
def test_a_fit_is_never_worse_than_none(seed: int, surprises: list[float]) -> None:
    problem = random_problem(seed, ops=30, devices=3)
    placements = plans(problem, 6)
    predicted_s = steps_s(problem, placements)
    measured_s = [own * by for own, by in zip(predicted_s, surprises, strict=True)]
    fit = fitted(problem, placements, measured_s)
    assert fit.error <= fit.error_before


def test_steps_as_they_were_predicted_change_nothing() -> None:
    problem = random_problem(3, ops=30, devices=3)
    placements = plans(problem, 6)
    fit = fitted(problem, placements, steps_s(problem, placements))
    assert fit.device_factors == (1.0, 1.0, 1.0)
    assert fit.transfer_factor == 1.0
    assert (fit.problem.cost_ns == problem.cost_ns).all()


def test_what_was_not_measured_stays_as_it_is() -> None:
    problem = random_problem(3, ops=30, devices=3)
    single = plans(problem, 3)[:1]
    fit = fitted(problem, single, [2.0 * steps_s(problem, single)[0]])
    assert fit.device_factors[0] == pytest.approx(2.0, rel=0.02)
    assert fit.device_factors[1:] == (1.0, 1.0)
    assert fit.transfer_factor == 1.0


def test_nothing_to_fit_to_is_refused() -> None:
    problem = random_problem(3, ops=5, devices=2)
    with pytest.raises(ValueError, match="0 placements"):
        fitted(problem, [], [])
    with pytest.raises(ValueError, match=r"\[0.0\] s"):
        fitted(problem, plans(problem, 2)[:1], [0.0])
