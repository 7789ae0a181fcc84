from __future__ import annotations

from itertools import pairwise

import pytest

from placer.placers import placer_named
from placer.search.budget import Budget
from placer.search.request import SearchRequest
from placer.search.trace import SearchTrace
from tests.helpers.random_problems import random_problem

EVALUATIONS = 400
BUDGET = Budget(evaluations=EVALUATIONS)


@pytest.mark.parametrize("name", ["portfolio", "annealing", "evolution", "cross-entropy"])
def test_a_trail_falls_to_the_best_plan(name: str) -> None:
    search_trace = SearchTrace()
    request = SearchRequest(random_problem(3), BUDGET, search_trace=search_trace)
    found = placer_named(name, None).place(request)
    for part in search_trace.parts.values():
        assert all(a.cost_s > b.cost_s for a, b in pairwise(part.improvements))
        assert all(a.evaluations <= b.evaluations for a, b in pairwise(part.improvements))
        assert part.improvements[-1].evaluations <= part.evaluations <= EVALUATIONS + 1
    best = min(part.improvements[-1].cost_s for part in search_trace.parts.values())
    assert best == pytest.approx(found[0].step_ns / 1e9)


def test_a_search_for_the_largest_load_leaves_a_trail_of_loads() -> None:
    search_trace = SearchTrace()
    request = SearchRequest(
        random_problem(3), BUDGET, objective="max-load", search_trace=search_trace
    )
    placer_named("portfolio", None).place(request)
    assert set(search_trace.parts) == {"annealing"}
    assert search_trace.parts["annealing"].improvements


def test_plans_that_do_not_fit_leave_no_trail() -> None:
    search_trace = SearchTrace()
    request = SearchRequest(random_problem(3, memory_bytes=1000), BUDGET, search_trace=search_trace)
    placer_named("portfolio", None).place(request)
    assert not search_trace.parts
