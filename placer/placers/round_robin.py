"""Round robin over devices."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Plan, Rule
from placer.search.judge import Judge
from placer.search.trivial import round_robin


class Turns(Rule):
    """Assigns ops in topological order to the devices in turn."""

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield one placement."""
        yield "round robin", round_robin(judge.problem), judge.outline.bottom_level
