"""Heterogeneous Earliest Finish Time (Topcuoglu et al. 2002), without insertion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.request import STEPS


class Heft(Rule):
    """Places ops by upward rank, each where it finishes first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield evaluator.candidate(Kind.HEFT, *decode(evaluator.scheduling, HEFT))
