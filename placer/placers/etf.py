"""Earliest Task First (Hwang et al. 1989)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.etf import etf
from placer.search.judge import Judge
from placer.search.request import STEPS


class Etf(Rule):
    """Repeatedly places the op and device that can start first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, judge: Judge) -> Iterable[Candidate]:
        """Yield one placement."""
        yield judge.candidate(Kind.ETF, *etf(judge.outline))
