"""Placers that compute placements by a rule, without search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from envs.max_load import max_load_ns
from envs.problem import Problem
from placer.search.candidate import Candidate
from placer.search.evaluator import Evaluator
from placer.search.request import ALL, MAX_LOAD, SearchRequest


class Rule(ABC):
    """Base class of placers with a few fixed placements, whatever budget and seed."""

    objectives: ClassVar[tuple[str, ...]] = ALL

    @abstractmethod
    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield the placements, at least one; see :meth:`Evaluator.candidate`."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all candidates, best first."""
        problem = request.problem
        return sorted_for(request.objective, problem, list(self.candidates(Evaluator(problem))))


def sorted_for(objective: str, problem: Problem, found: list[Candidate]) -> list[Candidate]:
    """Return the candidates sorted by step time or maximum load (stable)."""
    worth = np.array([candidate.step_ns for candidate in found])
    if objective == MAX_LOAD:
        worth = max_load_ns(problem, np.array([candidate.devices for candidate in found]))
    return [found[i] for i in np.argsort(worth, kind="stable").tolist()]
