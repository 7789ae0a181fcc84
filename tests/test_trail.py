from __future__ import annotations

from itertools import pairwise

import pytest
from random_problems import random_problem

from placer.placers import placer_named
from placer.search.budget import Budget
from placer.search.request import SearchRequest
from placer.search.trail import Trail

EVALUATIONS = 400
BUDGET = Budget(evaluations=EVALUATIONS)


@pytest.mark.parametrize("name", ["portfolio", "annealing", "evolution", "cross-entropy"])
def test_a_trail_falls_to_the_best_plan(name: str) -> None:
    trail = Trail()
    request = SearchRequest(random_problem(3), BUDGET, trail=trail)
    found = placer_named(name, None).place(request)
    for line in trail.lines.values():
        assert all(a.cost_s > b.cost_s for a, b in pairwise(line.finds))
        assert all(a.evaluations <= b.evaluations for a, b in pairwise(line.finds))
        assert line.finds[-1].evaluations <= line.evaluations <= EVALUATIONS + 1
    best = min(line.finds[-1].cost_s for line in trail.lines.values())
    assert best == pytest.approx(found[0].step_ns / 1e9)


def test_a_search_for_the_largest_load_leaves_a_trail_of_loads() -> None:
    trail = Trail()
    request = SearchRequest(random_problem(3), BUDGET, objective="max-load", trail=trail)
    placer_named("portfolio", None).place(request)
    assert set(trail.lines) == {"annealing"}
    assert trail.lines["annealing"].finds


def test_plans_that_do_not_fit_leave_no_trail() -> None:
    trail = Trail()
    request = SearchRequest(random_problem(3, memory_bytes=1000), BUDGET, trail=trail)
    placer_named("portfolio", None).place(request)
    assert not trail.lines
