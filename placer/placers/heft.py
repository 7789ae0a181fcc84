"""Heterogeneous Earliest Finish Time (Topcuoglu et al. 2002), without insertion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from placer.placers.placer import STEPS
from placer.placers.rule import Plan, Rule
from placer.search.decoder import HEFT, decode
from placer.search.heuristics import HEFT_NAME
from placer.search.judge import Judge


class Heft(Rule):
    """Places ops by upward rank, each where it finishes first."""

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def plans(self, judge: Judge) -> Iterable[Plan]:
        """Yield one placement."""
        yield HEFT_NAME, *decode(judge.outline, HEFT)
