"""Round robin over devices."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.judge import Judge
from placer.search.trivial import round_robin


class Turns(Rule):
    """Assigns ops in topological order to the devices in turn."""

    def candidates(self, judge: Judge) -> Iterable[Candidate]:
        """Yield one placement."""
        devices = round_robin(judge.problem)
        yield judge.candidate(Kind.ROUND_ROBIN, devices, judge.outline.bottom_level)
