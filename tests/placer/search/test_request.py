"""Budgets, meters and search traces."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from placer.search.objectives import Objective
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest, SearchTrace, candidates_of
from tests.helpers.random_problems import random_problem


@pytest.mark.parametrize(
    ("text", "seconds", "evaluations"),
    [
        ("20s", 20.0, None),
        (" 1.5S ", 1.5, None),
        ("2m", 120.0, None),
        ("1e4e", None, 10_000),
        ("30 evals", None, 30),
    ],
)
def test_budgets_are_seconds_or_evaluations(
    text: str, seconds: float | None, evaluations: int | None
) -> None:
    budget = Budget.parse(text)
    assert (budget.seconds, budget.evaluations) == (seconds, evaluations)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["", "20", "-1s", "0e", "1.5e", "nan s", "20h"])
def test_other_texts_are_no_budgets(text: str) -> None:
    with pytest.raises(ValueError, match=r"20s|4000e"):
        Budget.parse(text)
    with pytest.raises(ValueError, match="either"):
        Budget(seconds=1.0, evaluations=1)


def test_a_meter_reads_the_clock_of_its_request_and_stays_stopped() -> None:
    times_s = iter([10.0, 11.0, 12.5, 13.0])
    request = SearchRequest(random_problem(0), Budget(seconds=2.5), clock=lambda: next(times_s))
    meter = request.meter()
    assert meter.share() == 0.4
    assert meter.over()
    assert meter.seconds() == 3.0
    answers = iter([False, True, False])
    stopping = replace(request, budget=Budget(evaluations=10), should_stop=lambda: next(answers))
    meter = replace(stopping, clock=count().__next__).meter()
    assert [meter.over() for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize("name", ["portfolio", "annealing", "evolution"])
def test_a_trace_falls_to_the_cost_of_the_best_candidate(name: str) -> None:
    search_trace = SearchTrace()
    budget = Budget(evaluations=400)
    request = SearchRequest(random_problem(3), budget, search_trace=search_trace)
    best, *_ = placer_named(name).place(request)
    for part in search_trace.parts.values():
        assert all(a.cost_s > b.cost_s for a, b in pairwise(part.improvements))
        assert all(a.evaluations <= b.evaluations for a, b in pairwise(part.improvements))
        assert part.improvements[-1].evaluations <= part.evaluations <= 401
    lowest = min(part.improvements[-1].cost_s for part in search_trace.parts.values())
    assert lowest == pytest.approx(best.step_ns / 1e9)


@pytest.mark.parametrize(
    ("objective", "memory_bytes", "parts"),
    [("max-load", 10**12, {"annealing"}), ("latency", 1000, set()), ("max-load", 1000, set())],
)
def test_loads_are_traced_and_placements_that_do_not_fit_are_not(
    objective: str, memory_bytes: int, parts: set[str]
) -> None:
    search_trace, texts = SearchTrace(), list[str]()
    request = SearchRequest(
        random_problem(3, memory_bytes=memory_bytes),
        Budget(evaluations=400),
        objective=objective,
        search_trace=search_trace,
        progress=lambda _, text: texts.append(text),
    )
    placer_named("portfolio").place(request)
    assert set(search_trace.parts) == parts
    assert ("annealing, nothing fits" in texts) == (not parts)


class Answering:
    objectives = ("latency",)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def place(self, request: SearchRequest) -> Any:
        return self.answer


def test_a_placer_gives_a_list_of_candidates() -> None:
    request = SearchRequest(random_problem(3), Budget(evaluations=1))
    [one, *_] = placer_named("heft").place(request)
    wrong: Any = ((None, "NoneType"), ([], "list"), (one, "Candidate"), ([1], r"list\[int\]"))
    for answer, gave in wrong:
        with pytest.raises(ValueError, match=f"placer Answering gave {gave}: return a list of at"):
            Objective().search(request, Answering(answer))
    as_lists: Any = replace(one, devices=one.devices.tolist(), priority=one.priority.tolist())
    [same] = candidates_of(Answering((as_lists,)), request)
    assert (same.devices == one.devices).all()
    assert same.devices.dtype == np.int32
    assert same.priority.dtype == np.float64
    assert (same.priority == one.priority).all()
