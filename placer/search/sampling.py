"""Placers that evaluate samples until the budget is spent: their base, and that of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np

from envs.problem import Floats, Ints
from placer.search.candidate import Candidate, Kind
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import decode
from placer.search.request import STEP_OBJECTIVES, SearchRequest


class BudgetedEvaluator:
    """Evaluates placements one by one within a budget and keeps the best.

    The first placement is evaluated whatever the budget, so that there is always a best one.
    """

    def __init__(self, request: SearchRequest, kind: Kind, name: str = "") -> None:
        """Begin to spend the budget; the best candidate gets this kind and, if given, this name."""
        self.evaluator = Evaluator(request.problem)
        self.meter = request.meter()
        self.kind = kind
        self.name = name or kind.value
        self._best: tuple[int, Ints, Floats] | None = None

    def over(self) -> bool:
        """Return whether the budget is spent, after at least one evaluation."""
        return self._best is not None and self.meter.over()

    def evaluate(self, devices: Ints, priority: Floats) -> int:
        """Evaluate a placement, (N,) each, and return its cost as defined by :class:`Evaluator`."""
        cost = int(self.evaluator.costs(devices[None], priority[None])[0])
        self.meter.spend(1)
        if self._best is None or cost < self._best[0]:
            self._best = cost, devices.copy(), priority.copy()
        self.meter.note(self.name, self._best[0])
        return cost

    def best(self) -> Candidate:
        """Return the best placement; the first of equal ones."""
        assert self._best is not None, "a placer evaluates at least one placement"
        cost, devices, priority = self._best
        return self.evaluator.candidate(self.kind, devices, priority, cost, name=self.name)


class Sampling(ABC):
    """Base class of placers that return their best sample; at least one is evaluated."""

    objectives: ClassVar[tuple[str, ...]] = STEP_OBJECTIVES
    kind: ClassVar[Kind] = Kind.OTHER
    name: ClassVar[str] = ""
    """Display name; by default that of the kind."""

    @abstractmethod
    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate placements until the budget is spent."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate."""
        load_compiled_code()  # before the budget starts
        budgeted = BudgetedEvaluator(request, self.kind, self.name)
        self.sample(budgeted, request.seed)
        return [budgeted.best()]


class Proposer(Protocol):
    """A learned policy: proposes decoder weights for a problem."""

    def propose(self, evaluator: Evaluator, known: list[Candidate]) -> tuple[Floats, Floats]:
        """Return means (M, 21) and standard deviations (M, 21) of weights.

        ``known`` are the candidates of the heuristics. All means are tried in order, then samples
        around the best of them.
        """
        ...


class PolicyPlacer(Sampling):
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
