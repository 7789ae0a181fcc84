"""Round robin over devices."""

from __future__ import annotations

from collections.abc import Iterable

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import round_robin


class Turns(Rule):
    """Assigns ops in topological order to the devices in turn."""

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        devices = round_robin(evaluator.problem)
        yield evaluator.candidate(Kind.ROUND_ROBIN, devices, evaluator.scheduling.bottom_level)
