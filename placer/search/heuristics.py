"""The plans that every search begins with: trivial placements and classic list schedulers."""

from __future__ import annotations

from typing import Final

from placer.search.candidate import Candidate
from placer.search.decoder import HEFT, decode
from placer.search.etf import etf
from placer.search.judge import Judge
from placer.search.trivial import trivial_plans

HEFT_NAME: Final = "HEFT"
ETF_NAME: Final = "ETF"
SINGLE: Final = "single "
"""How the names of single-device candidates begin."""


def heuristics(judge: Judge) -> list[Candidate]:
    """Every single device, layer split, round robin, HEFT and ETF, in this order.

    Trivial placements run ready ops by bottom level.
    """
    by_level = judge.outline.bottom_level
    found = [judge.candidate(name, plan, by_level) for name, plan in trivial_plans(judge.problem)]
    if judge.problem.device_count > 1:
        found.append(judge.candidate(HEFT_NAME, *decode(judge.outline, HEFT)))
        found.append(judge.candidate(ETF_NAME, *etf(judge.outline)))
    return found
