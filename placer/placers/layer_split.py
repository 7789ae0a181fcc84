"""Contiguous layers, balanced."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Plan, Rule
from placer.search.contiguous import contiguous
from placer.search.judge import Judge
from placer.search.trivial import layer_split


class LayerSplit(Rule):
    """The split whose slowest part is fastest, for a chain the best there is.

    Memory is counted as if all outputs stayed; where that does not fit, parameters alone count and
    the simulator says whether the step does. Where not even those fit, parts are proportional to
    the speed of their devices.
    """

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """One plan, or two where memory is short."""
        problem, by_level = judge.problem, judge.outline.bottom_level
        plans = [contiguous(problem), contiguous(problem, keep_outputs=False)]
        found = [plan for plan in plans if plan is not None] or [layer_split(problem)]
        for plan in found[:1] if plans[0] is not None else found:
            yield "layer split, balanced", plan, by_level
