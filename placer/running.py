"""Runs the best candidates, and plans for less memory if they run out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.cluster import Cluster
from envs.measurement import Measurement
from envs.problem import Problem
from placer.outcome import Row
from placer.report.progress import Progress
from placer.warm_start import WARM_START

if TYPE_CHECKING:
    from placer.rigs import Rig

MEASURED_CANDIDATES: Final = 5
"""Number of best candidates to run besides the best single devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measurements of candidates that were run."""

    of_row: Mapping[int, Measurement] = field(default_factory=dict)
    all_cores: Measurement | None = None
    interrupted: bool = False


def run_best(rows: Sequence[Row], rig: Rig, problem: Problem, hear: Progress) -> Runs:
    """Run the best candidates and the best single devices in turn.

    Raises:
        WorkerError: the workers do not start.
    """
    chosen = worth_running(rows, problem.cluster)
    if not chosen:
        return Runs()
    longest_s = max((rows[i].predicted_s for i in chosen), default=0.0)
    with closing(rig.backend(problem, longest_s, rows[chosen[0]].predicted_s)) as backend:
        measurements = backend.measure(
            [rows[i].placement for i in chosen],
            progress=lambda done, total: hear.advance(done / total),
            reference=True,
        )
        return Runs(
            of_row={i: m for i, m in zip(chosen, measurements, strict=True) if m.counts},
            all_cores=backend.reference,
            interrupted=backend.interrupted,
        )


def overfull(rows: Sequence[Row], runs: Runs) -> bool:
    """Return whether all candidates on several devices ran out of memory."""
    several = [seen for i, seen in runs.of_row.items() if not rows[i].is_single]
    return bool(several) and all(seen.overfull for seen in several)


def with_less_memory(problem: Problem, share: float) -> Problem:
    """Return the problem with a share of each device's memory."""
    devices = tuple(
        replace(device, memory_bytes=int(device.memory_bytes * share))
        for device in problem.cluster.devices
    )
    return Problem.of(problem.graph, replace(problem.cluster, devices=devices))


def joined(
    rows: Sequence[Row], runs: Runs, more: Sequence[Row], later: Runs
) -> tuple[list[Row], Runs]:
    """Return the candidates and runs of a later search, with the failed ones of an earlier search.

    Runs are only compared with runs of the same rounds.
    """
    failed = [i for i, seen in runs.of_row.items() if seen.failure]
    of_failed = {len(more) + k: runs.of_row[i] for k, i in enumerate(failed)}
    joined = replace(later, of_row={**later.of_row, **of_failed})
    return [*more, *(rows[i] for i in failed)], joined


def worth_running(rows: Sequence[Row], cluster: Cluster) -> list[int]:
    """Return indices of candidates to run: best single device of each kind and best others.

    A warm start is always run.
    """
    kind_of = {device.name: device.kind for device in cluster.devices}
    feasible = [i for i, row in enumerate(rows) if np.isfinite(row.predicted_s)]
    by_time = sorted(feasible, key=lambda i: rows[i].predicted_s)
    singles: dict[str, int] = {}
    for i in by_time:
        if rows[i].is_single:
            placement = rows[i].placement
            singles.setdefault(kind_of[placement.device_names[placement.devices[0]]], i)
    others = [i for i in by_time if not rows[i].is_single]
    chosen = [*singles.values(), *others[:MEASURED_CANDIDATES]]
    return chosen + [i for i in by_time if rows[i].name == WARM_START and i not in chosen]
