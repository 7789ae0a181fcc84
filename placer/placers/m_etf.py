"""Earliest Task First with memory, as in Baechi (Jeon et al., SoCC 2020; arXiv 2301.08695)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.placer import STEPS
from placer.placers.rule import Plan, Rule
from placer.search.etf import memory_etf
from placer.search.judge import Judge


class MemoryEtf(Rule):
    """ETF that excludes devices without room for an op's parameters and output to stay."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield one placement."""
        yield "m-ETF", *memory_etf(judge.outline)
