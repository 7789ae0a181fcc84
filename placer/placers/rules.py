"""Placers that compute placements by a rule, without search.

HEFT is Heterogeneous Earliest Finish Time (Topcuoglu et al. 2002), without insertion; ETF is
Earliest Task First (Hwang et al. 1989); m-ETF is ETF with memory, as in Baechi (Jeon et al., SoCC
2020; arXiv 2301.08695).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from envs.problem import Problem
from envs.simulator.max_load import max_load_ns
from placer.search.candidate import Candidate, Kind
from placer.search.contiguous import contiguous
from placer.search.evaluator import Evaluator
from placer.search.heuristics import layer_split, round_robin, single_devices
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.list_scheduler.etf import etf, memory_etf
from placer.search.request import ALL, MAX_LOAD, STEPS, SearchRequest


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


class Single(Rule):
    """One placement per device; ops that are not allowed there go to their cheapest device."""

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Return the placement on each device, in cluster order."""
        return single_devices(evaluator)


class Turns(Rule):
    """Assigns ops in topological order to the devices in turn."""

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        devices = round_robin(evaluator.problem)
        yield evaluator.candidate(Kind.ROUND_ROBIN, devices, evaluator.scheduling.bottom_level)


class LayerSplit(Rule):
    """The split whose slowest part is fastest, optimal for a chain.

    Memory is counted as if all outputs stayed. If that does not fit, only parameters count and the
    simulator decides whether the step fits. If even parameters do not fit, parts are proportional
    to the speed of their devices.
    """

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        problem = evaluator.problem
        devices = contiguous(problem)
        if devices is None:
            devices = contiguous(problem, keep_outputs=False)
        if devices is None:
            devices = layer_split(problem)
        by_level, name = evaluator.scheduling.bottom_level, "layer split, balanced"
        yield evaluator.candidate(Kind.LAYER_SPLIT, devices, by_level, name=name)


class Heft(Rule):
    """Places ops by upward rank, each where it finishes first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield evaluator.candidate(Kind.HEFT, *decode(evaluator.scheduling, HEFT))


class Etf(Rule):
    """Repeatedly places the op and device that can start first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield evaluator.candidate(Kind.ETF, *etf(evaluator.scheduling))


class MemoryEtf(Rule):
    """ETF that excludes devices without room for an op's parameters and output to stay."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield evaluator.candidate(Kind.M_ETF, *memory_etf(evaluator.scheduling))
