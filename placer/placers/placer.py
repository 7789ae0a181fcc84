"""What a placer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, Protocol, TypeAlias

from envs.problem import Problem
from placer.search.budget import Budget
from placer.search.candidate import Candidate

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the spent share of the budget, 0 .. 1, and what is going on."""

LATENCY: Final = "latency"
MAX_LOAD: Final = "max-load"
STEPS: Final = (LATENCY, "throughput")
"""Objectives of a placer that looks for short steps: of one micro-batch, or of many."""
ALL: Final = (*STEPS, MAX_LOAD)


class Placer(Protocol):
    """Proposes which op runs on which device, and in which order.

    Every plan puts each op where it may run and a co-location group on one device. The same
    problem, seed and budget of evaluations give the same plans; see :mod:`placer.placers.contract`.
    """

    objectives: ClassVar[tuple[str, ...]]
    """What its plans are made for, of :data:`envs.placement.OBJECTIVES`."""

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
        """At least one plan, the best first.

        Args:
            problem: what to place where; under the objective "throughput", all micro-batches.
            budget: what may be spent. Rules that do not search take what they need.
            seed: of everything random.
            objective: one of ``objectives``; says which plan is best.
            progress: hears how far it is.
            should_stop: asked now and then; once it says True the best so far is returned.
        """
        ...
