"""The search that ``optimize`` uses by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from envs.problem import Problem
from placer.placers.placer import ALL, LATENCY, MAX_LOAD, Progress
from placer.search.balancing import balance
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.portfolio import Proposer, search


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Heuristics, then a policy if there is one, evolution and annealing; see the search itself.

    Loads are balanced by annealing alone, and no policy is asked.
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
        """All heuristics and the best plan of each search, the best first."""
        if objective == MAX_LOAD:
            return balance(problem, budget, seed, progress=progress, should_stop=should_stop)
        return search(
            problem, budget, seed, self.policy, progress=progress, should_stop=should_stop
        )
