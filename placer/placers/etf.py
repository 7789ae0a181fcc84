"""Earliest Task First (Hwang et al. 1989)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.placer import STEPS
from placer.placers.rule import Plan, Rule
from placer.search.etf import etf
from placer.search.heuristics import ETF_NAME
from placer.search.judge import Judge


class Etf(Rule):
    """Repeatedly places the op and device that can start first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield one placement."""
        yield ETF_NAME, *etf(judge.outline)
