"""The default search of ``optimize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from envs.problem import Problem
from placer.placers.placer import ALL, LATENCY, MAX_LOAD, Progress
from placer.search.annealing.max_load import balance
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.portfolio import Proposer, search


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Heuristics, a policy if given, evolution and annealing; see :mod:`placer.search.portfolio`.

    For the objective max-load annealing runs alone, without a policy.
    """

    policy: Proposer | None = None
    objectives: ClassVar[tuple[str, ...]] = ALL

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
        """Return all heuristics and the best placement of each search, best first."""
        if objective == MAX_LOAD:
            return balance(problem, budget, seed, progress=progress, should_stop=should_stop)
        return search(
            problem, budget, seed, self.policy, progress=progress, should_stop=should_stop
        )
