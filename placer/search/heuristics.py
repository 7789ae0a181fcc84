"""Initial candidates of every search: trivial placements and classic list schedulers."""

from __future__ import annotations

from typing import Final

from envs.simulator import INFEASIBLE_NS
from placer.search.candidate import Candidate
from placer.search.decoder import HEFT, decode
from placer.search.etf import etf
from placer.search.filling import first_layers
from placer.search.judge import Judge
from placer.search.trivial import trivial_plans

HEFT_NAME: Final = "HEFT"
ETF_NAME: Final = "ETF"
FIRST_LAYERS: Final = "first layers"


def heuristics(judge: Judge) -> list[Candidate]:
    """Return single devices, layer split, round robin, first layers, HEFT and ETF, in this order.

    "First layers" is included only if some single device cannot hold the model. Trivial placements
    run ready ops by upward rank.
    """
    by_level = judge.outline.bottom_level
    found = [judge.candidate(name, plan, by_level) for name, plan in trivial_plans(judge.problem)]
    singles = found[: judge.problem.device_count]
    if any(candidate.step_ns == INFEASIBLE_NS for candidate in singles) and len(singles) > 1:
        plan = first_layers(judge.problem, by_level)
        found.append(judge.candidate(FIRST_LAYERS, plan, by_level))
    if judge.problem.device_count > 1:
        found.append(judge.candidate(HEFT_NAME, *decode(judge.outline, HEFT)))
        found.append(judge.candidate(ETF_NAME, *etf(judge.outline)))
    return found
