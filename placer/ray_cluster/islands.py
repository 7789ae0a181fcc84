"""Search on islands: complete searches side by side, which go on from the best plan in rounds.

Every search of a round is a stateless task, so a node that dies costs time only. With a budget of
evaluations the number of islands depends on nothing else, and the result is the same on every
cluster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from envs.problem import Problem
from envs.simulator.max_load import max_load_ns
from placer.ray_cluster.address import ClusterError, NodesLostError
from placer.ray_cluster.connection import START_S
from placer.search.candidate import Candidate, Kind, distinct
from placer.search.compilation import load_compiled_beam, load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics, ranked_by
from placer.search.list_scheduler.beams import beams_suit
from placer.search.request import MAX_LOAD, Budget, Meter, Placer, SearchRequest, candidates_of

ISLANDS: Final = 8
"""Most islands with a budget of evaluations; in seconds there is one for each processor."""
ROUNDS: Final = 2
"""Most rounds: with four, 5 s on two processors found longer steps of large graphs."""
FEWEST_EVALUATIONS: Final = 250
"""Evaluations of one search for which it pays to have more islands, then more rounds."""
LATE: Final = 1.25
GRACE_S: Final = 1.0
"""In seconds, a search may take LATE times as long as the first half of its round, and GRACE_S."""
LOAD_S: Final = 120.0
"""Time in which all processors must load compiled code, which each node compiles once."""

T = TypeVar("T")


class Nodes(Protocol):
    """Runs tasks, as :class:`placer.ray_cluster.connection.RayCluster` does."""

    @property
    def processors(self) -> int:
        """Return the number of tasks that run at once."""
        ...

    def share(self, value: object, prepare: Callable[[Any], Any]) -> Any:
        """Return a value for tasks, which each process prepares once."""
        ...

    def run(
        self,
        function: Callable[..., T],
        shared: Any,
        tasks: Sequence[tuple[Any, ...]],
        should_end: Callable[[int], bool] = ...,
    ) -> list[T | None]:
        """Return the results of tasks; None for those that were cancelled."""
        ...


class IslandTask(NamedTuple):
    """One search of a round."""

    budget: Budget
    seed: int
    start: Candidate | None


@dataclass(frozen=True, slots=True)
class Islands:
    """Runs a placer on several islands of a cluster at once, in rounds.

    Each search has a seed of its own and starts from the best placement of all rounds before. With
    ``others`` so many more candidates are returned, of the same kinds with other devices.
    """

    placer: Placer
    nodes: Nodes
    others: int = 0

    @property
    def objectives(self) -> tuple[str, ...]:
        """Return the objectives of the placer."""
        return self.placer.objectives

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate of each kind, best first, and then others.

        What finished searches found is kept when a stop is requested, or all other nodes are lost.
        """
        request.report(0.0, "loading compiled code on the cluster")
        plain = replace(
            request,
            progress=None,
            should_stop=None,
            search_trace=None,
            workers=1,
            start=None,
            clock=time.perf_counter,
        )
        shared = self.nodes.share((self.placer, plain), prepared)
        self._load(request, shared)
        search = _Search(request, self.others)
        try:
            for number in range(rounds_of(request.budget)):
                if search.meter.over():
                    break
                self._round(search, shared, number)
        except ConnectionError as error:
            if isinstance(error, ClusterError) or not search.best:
                raise
        request.report(1.0, "done")
        return [*search.best, *_numbered(search.others)] or _heuristics(request)

    def _load(self, request: SearchRequest, shared: Any) -> None:
        """Start a process on each processor, which loads compiled code."""
        meter, tasks = request.meter(), [()] * self.nodes.processors
        loaded = self.nodes.run(
            ready, shared, tasks, lambda _: _stops(request) or meter.seconds() > LOAD_S
        )
        late = loaded.count(None)
        if late and not _stops(request):
            raise ConnectionError(
                f"{late} of {len(tasks)} processors of the Ray cluster have not loaded compiled "
                f"code within {LOAD_S:g} s: are they busy?"
            )

    def _round(self, search: _Search, shared: Any, number: int) -> None:
        tasks = search.tasks(number, self.nodes.processors)
        should_end = _RoundEnd(search, number, tasks).is_due
        try:
            found = self.nodes.run(island, shared, tasks, should_end)
        except NodesLostError as error:
            search.keep_all(error.found)
            raise
        search.keep_all(found)


class _Search:
    """The best candidates of all rounds so far, and the budget."""

    def __init__(self, request: SearchRequest, most_others: int) -> None:
        self.request = request
        self.most_others = most_others
        self.meter: Meter = request.meter()
        self.best: list[Candidate] = []  # one of each kind and name, best first
        self.others: list[Candidate] = []  # with other devices, best first

    def tasks(self, number: int, processors: int) -> list[IslandTask]:
        """Return the searches of a round, at least one."""
        budgets = self._budgets(number, processors)
        start = self.best[0] if self.best else self.request.start
        sequence = np.random.SeedSequence([self.request.seed, number])
        seeds = sequence.generate_state(len(budgets)).tolist()
        return [
            IslandTask(budget, seed, start) for budget, seed in zip(budgets, seeds, strict=True)
        ]

    def _budgets(self, number: int, processors: int) -> list[Budget]:
        total, rounds = self.request.budget, rounds_of(self.request.budget)
        if total.seconds is not None:
            left_s = max(total.seconds - self.meter.seconds(), 1e-3)
            return [Budget(seconds=left_s / (rounds - number))] * max(processors, 1)
        assert total.evaluations is not None
        count = islands_of(total.evaluations)
        each, more = divmod(total.evaluations, count * rounds)
        return [Budget(evaluations=each + (number * count + k < more)) for k in range(count)]

    def keep(self, candidates: list[Candidate], evaluations: int) -> None:
        """Add what an island found."""
        self.meter.spend(evaluations)
        Evaluator.count(evaluations)
        request = self.request
        best: dict[tuple[Kind, str], Candidate] = {}
        own = [*self.best, *self.others, *map(_owned, candidates)]
        ranking = ranked_by(request.objective, request.problem, own)
        for each in ranking:
            best.setdefault((each.kind, each.name), each)
        self.best = [*best.values()]
        known = {each.devices.tobytes() for each in self.best}
        others = [each for each in ranking if each.devices.tobytes() not in known]
        self.others = distinct(others, self.most_others)

    def keep_all(self, found: Sequence[tuple[list[Candidate], int] | None]) -> None:
        """Add what the islands of a round found, and report the best candidate so far."""
        for each in found:
            if each is not None:
                self.keep(*each)
        if self.best:
            self.meter.note(self.best[0].kind.value, _cost_ns(self.request, self.best[0]))


class _RoundEnd:
    """The end of a round before all of its searches have finished."""

    def __init__(self, search: _Search, number: int, tasks: Sequence[IslandTask]) -> None:
        self.search = search
        self.number = number
        self.count = len(tasks)
        self.seconds = tasks[0].budget.seconds
        self.began_s = search.meter.seconds()
        self.half_s: float | None = None  # when half of the searches had finished

    def is_due(self, finished: int) -> bool:
        """Report the progress; return whether the rest of the round is not waited for."""
        search, number = self.search, self.number
        share = search.meter.share()
        if self.seconds is None:
            share = (number + finished / self.count) / rounds_of(search.request.budget)
        best = f", best {search.best[0].name}" if search.best else ""
        text = f"round {number + 1}, {finished} of {self.count} islands{best}"
        search.request.report(share, text)
        return self._is_late(finished) or _stops(search.request)

    def _is_late(self, finished: int) -> bool:
        """Return whether the others take much longer than the first half, with a budget of time.

        If nothing finishes, processes may have to start again on other nodes, but not for ever.
        """
        if self.seconds is None:
            return False
        spent_s = self.search.meter.seconds() - self.began_s
        if 2 * finished < self.count:
            return spent_s > LATE * self.seconds + START_S
        if self.half_s is None:
            self.half_s = spent_s
        return spent_s > LATE * max(self.half_s, self.seconds) + GRACE_S


def rounds_of(budget: Budget) -> int:
    """Return the number of rounds that a budget is divided into.

    >>> rounds_of(Budget(seconds=20.0)), rounds_of(Budget(evaluations=4000))
    (2, 2)
    """
    if budget.evaluations is None:
        return ROUNDS
    each = FEWEST_EVALUATIONS * islands_of(budget.evaluations)
    return min(max(budget.evaluations // each, 1), ROUNDS)


def islands_of(evaluations: int) -> int:
    """Return the number of islands for a budget of evaluations.

    >>> islands_of(100), islands_of(1000), islands_of(100_000)
    (1, 4, 8)
    """
    return min(max(evaluations // FEWEST_EVALUATIONS, 1), ISLANDS)


def prepared(value: tuple[Placer, SearchRequest]) -> tuple[Placer, SearchRequest]:
    """Return the placer and the request, in a process that has loaded compiled code."""
    load_compiled_code()
    if beams_suit(value[1].problem):
        load_compiled_beam()
    return value


def ready(_: object) -> bool:
    """Return True from a process that is prepared."""
    return True


def island(
    shared: tuple[Placer, SearchRequest], budget: Budget, seed: int, start: Candidate | None
) -> tuple[list[Candidate], int]:
    """Return the candidates of one search and the evaluations that it took."""
    placer, request = shared
    before = Evaluator.evaluations
    found = candidates_of(placer, replace(request, budget=budget, seed=seed, start=start))
    return found, Evaluator.evaluations - before


def _stops(request: SearchRequest) -> bool:
    return request.should_stop is not None and request.should_stop()


def _owned(candidate: Candidate) -> Candidate:
    """Return a copy that does not lie in memory of the cluster."""
    devices, priority = candidate.devices.copy(), candidate.priority.copy()
    devices.setflags(write=False)
    priority.setflags(write=False)
    return replace(candidate, devices=devices, priority=priority)


def _numbered(others: Sequence[Candidate]) -> list[Candidate]:
    """Return spare candidates, named by their place after the best of their kind."""
    counts: Counter[str] = Counter()
    found = []
    for each in others:
        counts[each.name] += 1
        found.append(replace(each, name=f"{each.name} {counts[each.name] + 1}", spare=True))
    return found


def _cost_ns(request: SearchRequest, candidate: Candidate) -> int:
    if request.objective == MAX_LOAD:
        return int(max_load_ns(request.problem, candidate.devices)[0])
    return candidate.step_ns


def _heuristics(request: SearchRequest) -> list[Candidate]:
    """Return the heuristics, if no island finished."""
    problem: Problem = request.problem
    return ranked_by(request.objective, problem, heuristics(Evaluator(problem)))
