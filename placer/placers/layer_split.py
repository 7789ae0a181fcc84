"""Contiguous layers, balanced."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Plan, Rule
from placer.search.contiguous import contiguous
from placer.search.judge import Judge
from placer.search.trivial import layer_split


class LayerSplit(Rule):
    """The split whose slowest part is fastest, optimal for a chain.

    Memory is counted as if all outputs stayed. If that does not fit, only parameters count and the
    simulator decides whether the step fits. If even parameters do not fit, parts are proportional
    to the speed of their devices.
    """

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield one placement."""
        problem = judge.problem
        plan = contiguous(problem)
        if plan is None:
            plan = contiguous(problem, keep_outputs=False)
        if plan is None:
            plan = layer_split(problem)
        yield "layer split, balanced", plan, judge.outline.bottom_level
