"""Contiguous layers, balanced."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.contiguous import contiguous
from placer.search.evaluator import Evaluator
from placer.search.heuristics import layer_split


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
