"""Earliest Task First with memory, as in Baechi (Jeon et al., SoCC 2020; arXiv 2301.08695)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.rule import Rule
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.etf import memory_etf
from placer.search.request import STEPS


class MemoryEtf(Rule):
    """ETF that excludes devices without room for an op's parameters and output to stay."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield evaluator.candidate(Kind.M_ETF, *memory_etf(evaluator.scheduling))
