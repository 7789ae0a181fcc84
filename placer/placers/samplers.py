"""Placers that evaluate placement after placement until the budget is spent.

They are the cross-entropy method, evolution of the list scheduler's weights, and the learned policy
alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np

from placer.search.candidate import Candidate, Kind
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import BudgetedEvaluator
from placer.search.evolution import Evolution, cross_entropy
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.portfolio import POPULATION, SIGMA, Proposer
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


class CrossEntropy(Sampling):
    """Device probabilities learned for one problem; see :mod:`placer.search.evolution`."""

    kind: ClassVar[Kind] = Kind.CROSS_ENTROPY

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Run the cross-entropy method."""
        cross_entropy(budgeted, seed)


SETTLED: Final = 1e-3
"""Below this standard deviation samples decode alike: evolution restarts with twice the
population."""


class Evolved(Sampling):
    """CMA-ES on the 21 weights of the decoder, starting from those of HEFT."""

    kind: ClassVar[Kind] = Kind.EVOLUTION

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate HEFT, then one population after the other."""
        scheduling = budgeted.evaluator.scheduling
        budgeted.evaluate(*decode(scheduling, HEFT))
        restarts = 0
        evolution = Evolution(HEFT, sigma=SIGMA, seed=seed, population=POPULATION)
        while not budgeted.over():
            if evolution.sigma < SETTLED:
                restarts += 1
                evolution = Evolution(
                    HEFT, sigma=SIGMA, seed=seed + restarts, population=POPULATION << restarts
                )
            rows = evolution.ask()
            costs = []
            for row in rows:
                if budgeted.over():
                    return
                costs.append(budgeted.evaluate(*decode(scheduling, row)))
            evolution.tell(rows, np.array(costs))


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
