"""Placers that evaluate placement after placement until the budget is spent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from placer.search.candidate import Candidate, Kind
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import BudgetedEvaluator
from placer.search.request import STEPS, SearchRequest


class Sampling(ABC):
    """Base class of placers that return their best sample; at least one is evaluated."""

    objectives: ClassVar[tuple[str, ...]] = STEPS
    kind: ClassVar[Kind] = Kind.OTHER
    name: ClassVar[str] = ""
    """Display name; by default that of the kind."""

    @abstractmethod
    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate placements until the budget is spent."""

    def prepare(self) -> None:
        """Load the code that sampling runs, before the budget starts."""
        load_compiled_code()

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate."""
        self.prepare()
        budgeted = BudgetedEvaluator(request, self.kind, self.name)
        self.sample(budgeted, request.seed)
        return [budgeted.best()]
