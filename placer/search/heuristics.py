"""Initial candidates of every search: trivial placements and classic list schedulers."""

from __future__ import annotations

from envs.simulator import INFEASIBLE_NS
from placer.search.candidate import Candidate, Kind
from placer.search.decoder import HEFT, decode
from placer.search.etf import etf
from placer.search.filling import first_layers
from placer.search.judge import Judge
from placer.search.trivial import layer_split, round_robin, single_device


def heuristics(judge: Judge) -> list[Candidate]:
    """Return single devices, layer split, round robin, first layers, HEFT and ETF, in this order.

    "First layers" is included only if some single device cannot hold the model. Trivial placements
    run ready ops by upward rank.
    """
    problem, by_level = judge.problem, judge.outline.bottom_level
    singles = single_devices(judge)
    if problem.device_count == 1:
        return singles
    found = [
        *singles,
        judge.candidate(Kind.LAYER_SPLIT, layer_split(problem), by_level),
        judge.candidate(Kind.ROUND_ROBIN, round_robin(problem), by_level),
    ]
    if any(candidate.step_ns == INFEASIBLE_NS for candidate in singles):
        plan = first_layers(problem, by_level)
        found.append(judge.candidate(Kind.FIRST_LAYERS, plan, by_level))
    found.append(judge.candidate(Kind.HEFT, *decode(judge.outline, HEFT)))
    found.append(judge.candidate(Kind.ETF, *etf(judge.outline)))
    return found


def single_devices(judge: Judge) -> list[Candidate]:
    """Return a candidate for each device; its name says if ops that may not run there are not."""
    found = []
    for d, device in enumerate(judge.problem.cluster.names):
        devices = single_device(judge.problem, d)
        name = f"single {device}" if (devices == d).all() else f"{device} where allowed"
        by_level = judge.outline.bottom_level
        found.append(judge.candidate(Kind.SINGLE_DEVICE, devices, by_level, name=name))
    return found
