"""The decision rules: which candidates are run, and which one is the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from envs.hardware.cluster import Cluster
from envs.measurement import Measurement, contended, tied
from placer import messages
from placer.search.candidate import Candidate, Kind

MEASURED_CANDIDATES: Final = 5
"""Number of best candidates to run besides the best single devices."""

_Run: TypeAlias = tuple[Candidate, Measurement]


class PlacementError(RuntimeError):
    """No placement is possible; the message says why."""


def worth_running(candidates: Sequence[Candidate], cluster: Cluster) -> list[int]:
    """Return indices of candidates to run: best single device of each kind and best others.

    A warm start is always run.
    """
    feasible = [i for i, each in enumerate(candidates) if np.isfinite(each.predicted_s)]
    by_time = sorted(feasible, key=lambda i: candidates[i].predicted_s)
    singles: dict[str, int] = {}
    for i in by_time:
        if candidates[i].is_single:
            singles.setdefault(cluster.devices[candidates[i].devices[0]].kind, i)
    others = [i for i in by_time if not candidates[i].is_single]
    chosen = [*singles.values(), *others[:MEASURED_CANDIDATES]]
    warm_starts = [i for i in by_time if candidates[i].kind is Kind.WARM_START]
    return chosen + [i for i in warm_starts if i not in chosen]


def overfull(candidates: Sequence[Candidate]) -> bool:
    """Return whether all candidates that ran on several devices ran out of memory."""
    several = [each.measurement for each in candidates if each.measurement and not each.is_single]
    return bool(several) and all(measurement.overfull for measurement in several)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate: measured before predicted, and the simplest of those in a tie.

    A candidate that is slower than the best single device, or within noise of it, never wins.
    """
    tried = [each for each in candidates if each.measurement is not None]
    if not tried:
        feasible = [each for each in candidates if np.isfinite(each.predicted_s)]
        if not feasible:
            raise PlacementError(messages.no_placement(candidates))
        return min(feasible, key=lambda each: (each.predicted_s, each.simplicity))
    ran = [(each, runs) for each in tried if (runs := each.measurement) is not None and runs.ok]
    if not ran:
        raise PlacementError(messages.all_failed(tried))
    return _simplest_of_fastest(ran, contended=runs_contended(tried))


def _simplest_of_fastest(ran: Sequence[_Run], *, contended: bool) -> Candidate:
    def step_s(run: _Run) -> float:
        return run[1].step_s(contended=contended)

    fastest = min(ran, key=step_s)
    equal = [run for run in ran if tied(run[1], fastest[1], contended=contended)]
    single = min((run for run in ran if run[0].is_single), key=step_s, default=None)
    if single is not None and single not in equal:
        equal = [
            run
            for run in equal
            if step_s(run) < step_s(single) and not tied(run[1], single[1], contended=contended)
        ]
    if not equal:
        return (single or fastest)[0]
    return min(equal, key=lambda run: (run[0].simplicity, step_s(run)))[0]


def best_single_device(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the best candidate on one device, measured ones first; None if none can run."""
    singles = [each for each in candidates if each.is_single and each.can_run]
    measured = [each for each in singles if each.measurement is not None]
    busy = runs_contended(candidates)
    return min(measured or singles, key=lambda each: each.ranking_s(contended=busy), default=None)


def runs_contended(candidates: Sequence[Candidate]) -> bool:
    """Return whether other processes used the cores during the runs; CPU-clock times count then."""
    return contended([each.measurement for each in candidates if each.measurement is not None])
