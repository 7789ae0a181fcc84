"""The cross-entropy method."""

from __future__ import annotations

from typing import ClassVar

from placer.placers.sampling import Sampling
from placer.search.candidate import Kind
from placer.search.evaluator import BudgetedEvaluator
from placer.search.evolution import cross_entropy


class CrossEntropy(Sampling):
    """Device probabilities learned for one problem; see :mod:`placer.search.evolution`."""

    kind: ClassVar[Kind] = Kind.CROSS_ENTROPY

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Run the cross-entropy method."""
        cross_entropy(budgeted, seed)
