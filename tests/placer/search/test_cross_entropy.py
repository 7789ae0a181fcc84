from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from placer.placers import placer_named
from placer.search.budget import Budget
from placer.search.evaluator import Evaluator
from placer.search.evolution import SMOOTHING, draw, moved
from placer.search.request import SearchRequest
from tests.helpers.random_problems import random_problem


def test_probabilities_move_to_how_often_the_elite_chose() -> None:
    drawn = np.array([[0, 1]] * 2 + [[1, 0]] * 18)
    costs = np.array([1, 2, *range(10, 28)])  # the elite is two of twenty
    before = np.full((2, 2), 0.5)
    expected = SMOOTHING * np.array([[1.0, 0.0], [0.0, 1.0]]) + (1 - SMOOTHING) * before
    assert moved(before, drawn, costs) == pytest.approx(expected)


def test_draws_follow_the_probabilities_and_never_take_what_has_none() -> None:
    probability = np.array([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    drawn = draw(probability, 4000, np.random.default_rng(0))
    share = (drawn[:, 0, None] == np.arange(3)).mean(axis=0)
    assert share == pytest.approx([0.0, 0.25, 0.75], abs=0.03)
    assert (drawn[:, 1] == 0).all()


@pytest.mark.parametrize("seed", range(2))
def test_it_finds_the_best_placement_of_a_tiny_graph(seed: int) -> None:
    problem = random_problem(seed, ops=7, devices=2, unequal=seed % 2 == 1)
    evaluator = Evaluator(problem)
    plans = np.array(list(product(range(2), repeat=7)), np.int32)
    best = int(
        evaluator.costs(plans, np.tile(evaluator.scheduling.bottom_level, (len(plans), 1))).min()
    )
    [found] = placer_named("cross-entropy").place(
        SearchRequest(problem, Budget(evaluations=1500), seed=seed)
    )
    assert found.step_ns == best
