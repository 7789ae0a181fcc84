"""Earliest Task First (Hwang et al. 1989)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.etf import etf
from placer.search.request import STEPS


class Etf(Rule):
    """Repeatedly places the op and device that can start first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield evaluator.candidate(Kind.ETF, *etf(evaluator.scheduling))
