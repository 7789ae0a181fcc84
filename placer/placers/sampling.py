"""Placers that evaluate placement after placement until the budget is spent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from envs.problem import Problem
from placer.placers.placer import LATENCY, STEPS, Progress
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate
from placer.search.compiling import load_compiled_code
from placer.search.judge import Judge
from placer.search.tally import Tally


class Sampling(ABC):
    """Base class of placers that return their best sample; at least one is evaluated."""

    objectives: ClassVar[tuple[str, ...]] = STEPS
    name: ClassVar[str]

    @abstractmethod
    def sample(self, tally: Tally, seed: int) -> None:
        """Evaluate placements until the tally is over."""

    def prepare(self) -> None:
        """Load the code that sampling runs, before the budget starts."""
        load_compiled_code()

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
        """Return the best candidate; see :class:`placer.placers.placer.Placer`."""
        self.prepare()
        judge = Judge(problem)
        tally = Tally(judge, Meter(budget, should_stop), self.name, progress)
        self.sample(tally, seed)
        return [tally.best()]
