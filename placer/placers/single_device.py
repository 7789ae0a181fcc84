"""Everything on one device."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Plan, Rule
from placer.search.candidate import SINGLE
from placer.search.judge import Judge
from placer.search.trivial import single_device


class Single(Rule):
    """One plan per device; ops that may not run there are on the cheapest that they may."""

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """All ops on the first device, the second, and so on."""
        problem = judge.problem
        for d, name in enumerate(problem.cluster.names):
            yield f"{SINGLE}{name}", single_device(problem, d), judge.outline.bottom_level
