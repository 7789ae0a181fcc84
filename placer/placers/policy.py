"""The learned policy alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from placer.placers.sampling import Sampling
from placer.search.candidate import Kind
from placer.search.evaluator import BudgetedEvaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import decode
from placer.search.portfolio import Proposer


class Proposed(Sampling):
    """Decodes the policy's proposals, then samples around the best of them."""

    kind: ClassVar[Kind] = Kind.POLICY

    def __init__(self, policy: Proposer | None) -> None:
        if policy is None:
            raise ValueError("placer 'policy' is nothing without a trained policy: name one")
        self.policy = policy

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate proposals and samples; the heuristics that the policy needs are not counted."""
        evaluator = budgeted.evaluator
        means, deviations = self.policy.propose(evaluator, heuristics(evaluator))
        costs: list[int] = []
        for mean in means:
            costs.append(budgeted.evaluate(*decode(evaluator.scheduling, mean)))
            if budgeted.over():
                return
        best = int(np.argmin(costs))
        random = np.random.default_rng(seed)
        while not budgeted.over():
            normal = random.standard_normal(len(means[best]))
            budgeted.evaluate(
                *decode(evaluator.scheduling, means[best] + deviations[best] * normal)
            )
