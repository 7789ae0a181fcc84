"""The request for a search: what every placer receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final, TypeAlias

from envs.problem import Problem
from placer.search.budget import Budget, Meter
from placer.search.trace import SearchTrace

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the spent share of the budget, 0 .. 1, and a text."""

LATENCY: Final = "latency"
MAX_LOAD: Final = "max-load"
STEPS: Final = (LATENCY, "throughput")
"""Objectives of placers that minimize the step time: of one micro-batch, or of many."""
ALL: Final = (*STEPS, MAX_LOAD)


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """A problem, and how to search its placements.

    Attributes:
        problem: graph and cluster; under the objective "throughput", all micro-batches.
        budget: search budget. Heuristics without search take what they need.
        seed: random seed. With a budget of evaluations it determines the result.
        objective: one of the placer's ``objectives``; decides which candidate is best.
        progress: called with the progress.
        should_stop: polled now and then; once it returns True, a placer returns the best so far.
        search_trace: records the improvements of the search, if given.
    """

    problem: Problem
    budget: Budget
    _: KW_ONLY
    seed: int = 0
    objective: str = LATENCY
    progress: Progress | None = None
    should_stop: Callable[[], bool] | None = None
    search_trace: SearchTrace | None = None

    def meter(self) -> Meter:
        """Return a meter of the budget, which starts now."""
        return Meter(self.budget, self.should_stop, search_trace=self.search_trace)

    def report(self, share: float, text: str) -> None:
        """Report the spent share of the budget, at most 1, if anyone listens."""
        if self.progress is not None:
            self.progress(min(share, 1.0), text)
