"""The decision rules: which candidates are run, and which one is the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from envs.hardware.cluster import Cluster
from envs.measurement import Measurement, contended, tied
from placer.messages import remarks
from placer.search.candidate import Candidate, Kind, distinct

MEASURED_CANDIDATES: Final = 5
"""Number of best candidates to run besides the best single devices."""

OFF: Final = 0.1
"""Relative error of a prediction beyond which the search is repeated with fitted costs."""
INEXACT: Final = 0.05
"""Relative error beyond which costs are fitted to the last runs, without another search."""
FURTHER_CANDIDATES: Final = 2
"""Number of candidates of the repeated search to run."""
WORTHWHILE: Final = 0.02
"""Predicted gain over the first search that they need: fitted predictions are no more accurate."""

CLEAR: Final = 0.15
"""Lead of a baseline over all placements, in a few rounds, that more rounds need not confirm."""

_Run: TypeAlias = tuple[Candidate, Measurement]


class PlacementError(RuntimeError):
    """No placement is possible; the message says why."""


def worth_running(
    candidates: Sequence[Candidate], cluster: Cluster, count: int = MEASURED_CANDIDATES
) -> list[int]:
    """Return indices of candidates to run: best single device of each kind, ``count`` best others.

    A warm start and the unplaced model are always run.
    """
    feasible = [
        i
        for i, each in enumerate(candidates)
        if np.isfinite(each.predicted_s) and not each.eliminated
    ]
    by_time = sorted(feasible, key=lambda i: candidates[i].predicted_s)
    singles: dict[str, int] = {}
    for i in by_time:
        if candidates[i].is_single:
            singles.setdefault(cluster.devices[candidates[i].devices[0]].kind, i)
    others = [i for i in by_time if not (candidates[i].is_single or candidates[i].is_unplaced)]
    chosen = [*singles.values(), *others[:count]]
    always = [i for i in by_time if candidates[i].kind in (Kind.WARM_START, Kind.UNPLACED)]
    return chosen + [i for i in always if i not in chosen]


def without_slower_singles(candidates: Sequence[Candidate], chosen: Sequence[int]) -> list[int]:
    """Return the chosen ones without single devices that are predicted to lose to the model itself.

    That is the unplaced model on one device, which is one of the chosen.
    """
    unplaced = [candidates[i] for i in chosen if candidates[i].is_unplaced]
    unplaced_s = min(
        (each.predicted_s for each in unplaced if each.is_on_one_device), default=np.inf
    )
    return [
        i
        for i in chosen
        if not candidates[i].is_single
        or candidates[i].kind is Kind.WARM_START
        or candidates[i].predicted_s < unplaced_s
    ]


def with_one_baseline(candidates: Sequence[Candidate], chosen: Sequence[int]) -> list[int]:
    """Return the chosen ones with a single baseline, and any warm start.

    It is the unplaced model, on the devices where it is fastest by prediction, or else the fastest
    single device.
    """
    unplaced = [i for i in chosen if candidates[i].is_unplaced]
    baselines = [i for i in chosen if candidates[i].is_single or candidates[i].is_unplaced]
    fastest = min(unplaced or baselines, key=lambda i: candidates[i].predicted_s, default=None)
    kept = {fastest, *(i for i in chosen if candidates[i].kind is Kind.WARM_START)}
    return [i for i in chosen if i not in baselines or i in kept]


def has_headroom(candidates: Sequence[Candidate], lower_bound_s: float) -> bool:
    """Return whether the lower bound lets a placement beat the best single device."""
    singles = [each.predicted_s for each in candidates if each.is_single]
    return min(singles, default=np.inf) > (1 + remarks.NO_HEADROOM) * lower_bound_s


def overfull(candidates: Sequence[Candidate]) -> bool:
    """Return whether all candidates that ran on several devices ran out of memory."""
    several = [
        each.measurement
        for each in candidates
        if each.measurement and not (each.is_single or each.is_unplaced or each.eliminated)
    ]
    return bool(several) and all(measurement.overfull for measurement in several)


def mispredicted(
    candidates: Sequence[Candidate], off: float = OFF, *, is_last: bool = False
) -> Candidate | None:
    """Return the choice, or the fastest placement on several devices, if its prediction is off.

    That is by more than a relative error of ``off``. Before the last runs the unplaced model does
    not count: its costs are of no use to a search.
    """
    ran = [each for each in candidates if each.measurement is not None and each.can_run]
    placed = [each for each in ran if not each.is_unplaced]
    several = [each for each in placed if not each.is_single]
    fastest = min(several, key=lambda each: each.ranking_s(contended=False), default=None)
    for each in (choose(ran if is_last else placed), fastest) if placed else ():
        if each and abs(each.predicted_s / each.ranking_s(contended=False) - 1) > off:
            return each
    return None


def worth_running_too(found: Sequence[Candidate], before: Sequence[Candidate]) -> list[Candidate]:
    """Return the best of a repeated search, if it may be faster than all placements that ran.

    The predictions of both are by the same costs.
    """
    tried = [each for each in before if each.measurement is not None and not each.eliminated]
    ran = [each for each in tried if each.can_run]
    least_s = min(each.predicted_s for each in ran if not each.is_unplaced)
    hopeless_s = min(each.ranking_s(contended=False) for each in ran) * (1 + OFF)
    others = [each for each in found if not (each.is_single or each.is_unplaced or each.spare)]
    limit_s = min(least_s * (1 - WORTHWHILE), hopeless_s)
    faster = [each for each in others if each.predicted_s < limit_s]
    return distinct(sorted(faster, key=lambda each: each.predicted_s), FURTHER_CANDIDATES)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate: measured before predicted, and the simplest of those in a tie.

    A candidate that is slower than the unplaced model or the best single device, or within noise of
    it, never wins. On a busy machine the unplaced model on several cores, which has wall times
    only, is compared with nothing, unless it is the only baseline: then all are by wall times.
    Where it was not run, it is the answer only without a placement.
    """
    tried = [each for each in candidates if each.measurement is not None and not each.eliminated]
    if not tried:
        placed = [each for each in candidates if not each.is_unplaced] or candidates
        feasible = [each for each in placed if np.isfinite(each.predicted_s)]
        if not feasible:
            raise PlacementError(remarks.no_placement(placed))
        return min(feasible, key=lambda each: (each.predicted_s, each.simplicity))
    ran = [(each, runs) for each in tried if (runs := each.measurement) is not None and runs.ok]
    if not ran:
        raise PlacementError(remarks.all_failed(tried))
    busy = runs_contended(tried)
    baselines = [each for each, _ in ran if each.is_single or each.is_unplaced]
    if baselines and not any(each.is_comparable(contended=busy) for each in baselines):
        return _simplest_of_fastest(ran, contended=False)
    comparable = [run for run in ran if run[0].is_comparable(contended=busy)]
    return _simplest_of_fastest(comparable or ran, contended=busy)


def _simplest_of_fastest(ran: Sequence[_Run], *, contended: bool) -> Candidate:
    def step_s(run: _Run) -> float:
        return run[1].step_s(contended=contended)

    fastest = min(ran, key=step_s)
    equal = [run for run in ran if tied(run[1], fastest[1], contended=contended)]
    single = min((run for run in ran if run[0].is_single), key=step_s, default=None)
    unplaced = min((run for run in ran if run[0].is_unplaced), key=step_s, default=None)
    for baseline in (single, unplaced):
        if baseline is not None and baseline not in equal:
            equal = [
                run
                for run in equal
                if step_s(run) < step_s(baseline)
                and not tied(run[1], baseline[1], contended=contended)
            ]
    if not equal:
        return min((run for run in (single, unplaced) if run), key=step_s, default=fastest)[0]
    return min(equal, key=lambda run: (run[0].simplicity, step_s(run)))[0]


def finalists(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return what is run once more: the placements that may be the fastest, and the baselines.

    These are the fastest placement, the simplest of those within noise of it, a warm start, the
    fastest on one device and the fastest unplaced model. Returns [] where there is nothing to
    compare, a baseline is far ahead even of the luckiest placement, or other processes use the
    cores, where more runs cost much and tell little.
    """
    tried = [each for each in candidates if each.measurement is not None and not each.eliminated]
    ran = [each for each in tried if each.can_run]
    if runs_contended(ran):
        return []

    def fastest(some: Sequence[Candidate]) -> list[Candidate]:
        return sorted(some, key=lambda each: each.ranking_s(contended=False))[:1]

    several = [each for each in ran if not (each.is_single or each.is_unplaced)]
    others = [each for each in ran if each not in several]
    for placed, baseline in zip(fastest(several), fastest(others), strict=False):
        if placed.ranking_s(contended=False) > (1 + CLEAR) * baseline.ranking_s(contended=False):
            return []
    found = [*fastest(several), choose(several)] if several else []
    found += fastest([each for each in ran if each.is_on_one_device])
    found += fastest([each for each in ran if each.is_unplaced])
    found += [each for each in ran if each.kind is Kind.WARM_START]
    return list(dict.fromkeys(found)) if len(set(found)) > 1 else []


def best_single_device(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the best candidate on one device, measured ones first; None if none can run.

    It may be the model's own code.
    """
    busy = runs_contended(candidates)
    singles = [
        each
        for each in candidates
        if each.is_on_one_device and each.can_run and each.is_comparable(contended=busy)
    ]
    measured = [each for each in singles if each.measurement is not None and not each.eliminated]
    return min(measured or singles, key=lambda each: each.ranking_s(contended=busy), default=None)


def runs_contended(candidates: Sequence[Candidate]) -> bool:
    """Return whether other processes used the cores during the runs; CPU-clock times count then.

    Runs of placements tell: without any, wall times count, which all unplaced models have.
    """
    ran = [each for each in candidates if not (each.is_unplaced or each.eliminated)]
    return contended([each.measurement for each in ran if each.measurement])
