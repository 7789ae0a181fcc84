"""Placers that compute placements by a rule, without search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.max_load import max_load_ns
from envs.problem import Problem
from placer.placers.placer import ALL, LATENCY, MAX_LOAD, Progress
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.judge import Judge

Plan: TypeAlias = tuple[str, NDArray[np.int32], NDArray[np.float64]]
"""Name, devices (N,) and priorities (N,)."""


class Rule(ABC):
    """Base class of placers with a few fixed placements, whatever budget and seed."""

    objectives: ClassVar[tuple[str, ...]] = ALL

    @abstractmethod
    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield the placements, at least one."""

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
        """Return all candidates, best first; see :class:`placer.placers.placer.Placer`."""
        judge = Judge(problem)
        return sorted_for(objective, problem, [judge.candidate(*p) for p in self.plans(judge)])


def sorted_for(objective: str, problem: Problem, found: list[Candidate]) -> list[Candidate]:
    """Return the candidates sorted by step time or maximum load (stable)."""
    worth = np.array([candidate.step_ns for candidate in found])
    if objective == MAX_LOAD:
        worth = max_load_ns(problem, np.array([candidate.devices for candidate in found]))
    return [found[i] for i in np.argsort(worth, kind="stable").tolist()]
