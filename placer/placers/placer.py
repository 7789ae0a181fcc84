"""The protocol of placers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, Protocol, TypeAlias

from envs.problem import Problem
from placer.search.budget import Budget
from placer.search.candidate import Candidate

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the spent share of the budget, 0 .. 1, and a text."""

LATENCY: Final = "latency"
MAX_LOAD: Final = "max-load"
STEPS: Final = (LATENCY, "throughput")
"""Objectives of placers that minimize the step time: of one micro-batch, or of many."""
ALL: Final = (*STEPS, MAX_LOAD)


class Placer(Protocol):
    """Search algorithm that returns devices and order of ops.

    Every candidate puts each op on an allowed device and a co-location group on one device. The
    same problem, seed and budget of evaluations give the same candidates; see
    :mod:`placer.placers.contract`.
    """

    objectives: ClassVar[tuple[str, ...]]
    """Supported objectives, of :data:`envs.placement.OBJECTIVES`."""

    def place(
        self,
        problem: Problem,
        budget: Budget,
        seed: int,
        *,
        objective: str = LATENCY,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Candidate]:
        """Return at least one candidate, best first.

        Args:
            problem: graph and cluster; under the objective "throughput", all micro-batches.
            budget: search budget. Heuristics without search take what they need.
            seed: random seed.
            objective: one of ``objectives``; decides which candidate is best.
            progress: called with the progress.
            should_stop: polled now and then; once it returns True the best so far is returned.
        """
        ...
