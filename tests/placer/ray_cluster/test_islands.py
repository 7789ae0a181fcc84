"""Islands search in rounds: what they share, and what is kept when a search ends early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from envs.simulator.max_load import max_load_ns
from placer.job import SearchConfig
from placer.pipeline import optimize_problem
from placer.ray_cluster.address import ClusterError, NodesLostError
from placer.ray_cluster.connection import START_S
from placer.ray_cluster.islands import (
    GRACE_S,
    LATE,
    LOAD_S,
    ROUNDS,
    Islands,
    islands_of,
    rounds_of,
)
from placer.search.candidate import Candidate
from placer.search.contract import CHECKS, Make
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest, SearchTrace
from tests.helpers.random_problems import random_problem
from tests.helpers.ray_nodes import InTurn

PROBLEM = random_problem(3, ops=60, devices=3)
THOUSAND = Budget(evaluations=1000)
OF_THIS_PROCESS = ("evaluations_are_limited", "time_is_limited")
"""Checks that count evaluations of this process, or give it a clock that nodes do not have."""


class Recorded:
    """The heuristic HEFT, which records its requests."""

    objectives = ("latency", "throughput", "max-load")

    def __init__(self) -> None:
        self.requests: list[SearchRequest] = []

    def place(self, request: SearchRequest) -> list[Candidate]:
        self.requests.append(request)
        return placer_named("heft").place(request)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("check", [c for c in CHECKS if c.__name__ not in OF_THIS_PROCESS])
@pytest.mark.parametrize("name", ["portfolio", "annealing"])
def test_islands_keep_the_contract(name: str, check: Callable[[Make], None]) -> None:
    check(lambda: Islands(placer_named(name), InTurn()))


@pytest.mark.parametrize("evaluations", [1, 249, 1000, 1003, 4001, 50_000])
def test_searches_share_the_evaluations_and_have_seeds_of_their_own(evaluations: int) -> None:
    recorded, budget = Recorded(), Budget(evaluations=evaluations)
    Islands(recorded, InTurn()).place(SearchRequest(PROBLEM, budget, seed=7))
    each = [request.budget.evaluations or 0 for request in recorded.requests]
    assert sum(each) == evaluations
    assert max(each) - min(each) <= 1
    assert len(each) == islands_of(evaluations) * rounds_of(budget)
    assert len({request.seed for request in recorded.requests}) == len(each)


def test_a_round_starts_from_the_best_of_those_before() -> None:
    recorded = Recorded()
    [found] = Islands(recorded, InTurn()).place(SearchRequest(PROBLEM, Budget(evaluations=4000)))
    starts = [request.start for request in recorded.requests]
    assert starts[:8] == [None] * 8
    assert {start.step_ns for start in starts[8:] if start is not None} == {found.step_ns}
    assert None not in starts[8:]


@pytest.mark.parametrize("name", ["portfolio", "annealing"])
@pytest.mark.parametrize("objective", ["latency", "max-load"])
def test_a_start_is_never_made_worse(name: str, objective: str) -> None:
    placer = placer_named(name, objective=objective)
    long = SearchRequest(PROBLEM, Budget(evaluations=20_000), objective=objective)
    best = placer.place(long)[0]
    again = placer.place(replace(long, budget=Budget(evaluations=5), start=best))[0]
    assert again.step_ns <= best.step_ns or objective == "max-load"
    assert max_load_ns(PROBLEM, again.devices) <= max_load_ns(PROBLEM, best.devices) or (
        objective == "latency"
    )


def test_the_number_of_processors_does_not_change_a_search_by_evaluations() -> None:
    found = []
    for processors in (1, 5):
        nodes = InTurn()
        nodes.processors = processors
        candidates = Islands(placer_named("portfolio"), nodes).place(
            SearchRequest(PROBLEM, THOUSAND, seed=1)
        )
        found.append([(c.name, c.step_ns, c.devices.tolist()) for c in candidates])
    assert found[0] == found[1]


def test_other_placements_of_the_islands_follow_the_best_of_each_kind() -> None:
    request = SearchRequest(PROBLEM, THOUSAND, seed=1)
    best = Islands(placer_named("portfolio"), InTurn()).place(request)
    more = Islands(placer_named("portfolio"), InTurn(), others=6).place(request)
    names = [(each.name, each.step_ns) for each in more]
    assert names[: len(best)] == [(each.name, each.step_ns) for each in best]
    others = more[len(best) :]
    assert 1 <= len(others) <= 6
    known = {each.devices.tobytes() for each in best}
    assert len({each.devices.tobytes() for each in others} - known) == len(others)
    assert len({each.name for each in more}) == len(more)
    assert [each.spare for each in more] == [False] * len(best) + [True] * len(others)
    assert [each.step_ns for each in others] == sorted(each.step_ns for each in others)


def test_seconds_are_those_of_all_rounds_and_of_a_search_on_each_processor() -> None:
    recorded = Recorded()
    request = SearchRequest(PROBLEM, Budget(seconds=8.0), clock=lambda: 0.0)
    Islands(recorded, InTurn()).place(request)
    seconds = [request.budget.seconds for request in recorded.requests]
    assert seconds == [8 / 2] * 2 + [8.0] * 2
    assert len(seconds) == ROUNDS * InTurn.processors


def test_what_finished_is_kept_when_a_stop_is_requested() -> None:
    stops: list[str] = []
    recorded = Recorded()
    request = SearchRequest(
        PROBLEM,
        Budget(evaluations=4000),
        should_stop=lambda: len(recorded.requests) >= 3,
        progress=lambda _, text: stops.append(text),
    )
    [found] = Islands(recorded, InTurn()).place(request)
    assert found.name == "HEFT"
    assert len(recorded.requests) == 3
    assert stops[-1] == "done"


def test_a_search_that_is_stopped_at_once_gives_the_heuristics() -> None:
    request = SearchRequest(PROBLEM, THOUSAND, should_stop=lambda: True)
    names = [each.name for each in Islands(Recorded(), InTurn()).place(request)]
    assert {"HEFT", "ETF"} < set(names)


class Losing(InTurn):
    """Fails in the third call: loading, the first round, the second."""

    def __init__(self, error: Exception) -> None:
        self.calls = 0
        self.error = error

    def run(self, *arguments: Any) -> list[Any]:
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return super().run(*arguments)


class LosingAfterOne(InTurn):
    """Loses all nodes after the first search."""

    def run(self, function: Any, shared: Any, tasks: Any, should_end: Any = None) -> list[Any]:
        del should_end
        found = super().run(function, shared, tasks[:1])
        if tasks[0]:
            raise NodesLostError([*found, None])
        return found


def test_a_search_that_finished_before_all_nodes_were_lost_is_kept() -> None:
    recorded, request = Recorded(), SearchRequest(PROBLEM, Budget(evaluations=4000))
    [found] = Islands(recorded, LosingAfterOne()).place(request)
    assert found.name == "HEFT"
    assert len(recorded.requests) == 1


def test_what_was_found_is_kept_when_all_nodes_are_lost() -> None:
    request = SearchRequest(PROBLEM, Budget(evaluations=4000))
    [found] = Islands(Recorded(), Losing(ConnectionError("lost"))).place(request)
    assert found.name == "HEFT"


def test_a_node_of_another_version_that_joins_later_ends_the_search() -> None:
    request = SearchRequest(PROBLEM, Budget(evaluations=4000))
    with pytest.raises(ClusterError, match=r"torch 0\.1"):
        Islands(Recorded(), Losing(ClusterError("node n has torch 0.1"))).place(request)


class Slow(InTurn):
    """A share of the searches finishes in time, the others never do."""

    def __init__(self, share: float = 0.5, loaded: int = 2) -> None:
        self.now = 0.0
        self.finishing = share
        self.loaded = loaded
        self.waited_s: list[float] = []

    def run(
        self, function: Any, shared: Any, tasks: Any, should_end: Any = lambda _: False
    ) -> list[Any]:
        began, finished = self.now, round(len(tasks) * self.finishing)
        if not tasks[0]:
            finished = self.loaded
        else:
            self.now += tasks[0].budget.seconds
        results = [function(shared, *task) for task in tasks[:finished]]
        while finished < len(tasks) and not should_end(finished):
            self.now += 0.01
        self.waited_s.append(self.now - began)
        return [*results, *[None] * (len(tasks) - finished)]

    def placed(self) -> list[Candidate]:
        """Return what a search of 8 s finds."""
        request = SearchRequest(PROBLEM, Budget(seconds=8.0), clock=lambda: self.now)
        return Islands(Recorded(), self).place(request)


def test_late_searches_are_not_waited_for_with_a_budget_in_seconds() -> None:
    nodes = Slow()
    nodes.placed()
    assert nodes.waited_s[1] == pytest.approx(LATE * 4.0 + GRACE_S, abs=0.1)


def test_a_round_of_seconds_in_which_nothing_finishes_ends() -> None:
    nodes = Slow(share=0.0)
    assert {"HEFT", "ETF"} < {each.name for each in nodes.placed()}
    assert nodes.waited_s[1:] == [pytest.approx(LATE * 4.0 + START_S, abs=0.1)]


def test_processors_that_do_not_load_compiled_code_are_reported() -> None:
    nodes = Slow(loaded=1)
    with pytest.raises(ConnectionError, match=r"1 of 2 processors .* within 120 s"):
        nodes.placed()
    assert nodes.waited_s == [pytest.approx(LOAD_S, abs=0.1)]


def test_the_trace_has_the_evaluations_of_all_islands() -> None:
    trace = SearchTrace()
    Islands(placer_named("portfolio"), InTurn()).place(
        SearchRequest(PROBLEM, THOUSAND, search_trace=trace)
    )
    assert 500 < max(part.evaluations for part in trace.parts.values()) <= 1100


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        ("rays", "neither a number nor 'ray'"),
        ("ray://", "neither a number"),
        ("ray://host", "neither a number"),
        ("ray://host:port", "neither a number"),
        (0, "below 1"),
    ],
)
def test_workers_are_a_number_or_the_address_of_a_cluster(
    workers: int | str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        SearchConfig(workers=workers)


def test_a_cluster_searches_with_one_thread_each() -> None:
    assert SearchConfig(workers="ray").worker_count == 1
    assert SearchConfig(workers="ray").ray_address == ""
    assert SearchConfig(workers="ray://node:6379").ray_address == "node:6379"
    assert SearchConfig(workers=3).ray_address is None


def test_a_missing_cluster_is_reported_before_the_search() -> None:
    pytest.importorskip("ray")
    config = SearchConfig(workers="ray://127.0.0.1:1", budget="10e", measure=False)
    with pytest.raises(ConnectionError, match=r"nothing answers at 127\.0\.0\.1:1"):
        optimize_problem(PROBLEM, config)
