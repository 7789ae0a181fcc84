"""All ops on one device."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Rule
from placer.search.candidate import Candidate
from placer.search.evaluator import Evaluator
from placer.search.heuristics import single_devices


class Single(Rule):
    """One placement per device; ops that are not allowed there go to their cheapest device."""

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Return the placement on each device, in cluster order."""
        return single_devices(evaluator)
