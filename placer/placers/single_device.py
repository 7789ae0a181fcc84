"""All ops on one device."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Plan, Rule
from placer.search.candidate import SINGLE
from placer.search.judge import Judge
from placer.search.trivial import single_device


class Single(Rule):
    """One placement per device; ops that are not allowed there go to their cheapest device."""

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield the placement on each device, in cluster order."""
        problem = judge.problem
        for d, name in enumerate(problem.cluster.names):
            yield f"{SINGLE}{name}", single_device(problem, d), judge.outline.bottom_level
