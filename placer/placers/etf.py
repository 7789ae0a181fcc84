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
    """The op and the device that can start first, again and again."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """One plan."""
        yield ETF_NAME, *etf(judge.outline)
