"""All ops on one device."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Rule
from placer.search.candidate import Candidate
from placer.search.heuristics import single_devices
from placer.search.judge import Judge


class Single(Rule):
    """One placement per device; ops that are not allowed there go to their cheapest device."""

    def candidates(self, judge: Judge) -> Iterable[Candidate]:
        """Return the placement on each device, in cluster order."""
        return single_devices(judge)
