from __future__ import annotations

from itertools import pairwise

import pytest
from random_problems import random_problem

from placer.placers import placer_named
from placer.search.budget import Budget, Meter
from placer.search.trail import recorded

EVALUATIONS = 400
BUDGET = Budget(evaluations=EVALUATIONS)


@pytest.mark.parametrize("name", ["portfolio", "annealing", "evolution", "cross-entropy"])
def test_a_trail_falls_to_the_best_plan(name: str) -> None:
    problem = random_problem(3)
    with recorded() as trail:
        found = placer_named(name, None).place(problem, BUDGET, 0)
    for line in trail.lines.values():
        assert all(a.cost_s > b.cost_s for a, b in pairwise(line.finds))
        assert all(a.evaluations <= b.evaluations for a, b in pairwise(line.finds))
        assert line.finds[-1].evaluations <= line.evaluations <= EVALUATIONS + 1
    best = min(line.finds[-1].cost_s for line in trail.lines.values())
    assert best == pytest.approx(found[0].step_ns / 1e9)


def test_a_search_for_the_largest_load_leaves_a_trail_of_loads() -> None:
    with recorded() as trail:
        placer_named("portfolio", None).place(random_problem(3), BUDGET, 0, objective="max-load")
    assert set(trail.lines) == {"annealing"}
    assert trail.lines["annealing"].finds


def test_plans_that_do_not_fit_leave_no_trail() -> None:
    with recorded() as trail:
        placer_named("portfolio", None).place(random_problem(3, memory_bytes=1000), BUDGET, 0)
    assert not trail.lines


def test_nothing_is_kept_where_nobody_records() -> None:
    with recorded() as trail:
        pass
    meter = Meter(BUDGET)
    meter.note("evolution", 1000)
    assert meter.trail is None
    assert not trail.lines
