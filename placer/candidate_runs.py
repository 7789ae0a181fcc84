"""Running the best candidates of a search, and searching again if memory does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from envs.backend import Backend, measurements
from envs.hardware.cluster import Cluster
from envs.measurement import Measurement
from envs.problem import Problem
from envs.runtime import Runtime
from placer.progress import Progress
from placer.search.candidate import Candidate, Kind

MEASURED_CANDIDATES: Final = 5
"""Number of best candidates to run besides the best single devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All candidates, with the measurements of those that were run."""

    candidates: list[Candidate]
    all_cores: Measurement | None = None
    interrupted: bool = False


def run_best(
    candidates: Sequence[Candidate],
    source: Runtime | Backend,
    problem: Problem,
    progress: Progress,
) -> Runs:
    """Run the best candidates and the best single devices in turn.

    Raises:
        WorkerError: the workers do not start.
    """
    chosen = worth_running(candidates, problem.cluster)
    if not chosen:
        return Runs(candidates=list(candidates))
    placements = [candidates[i].placement for i in chosen]

    def advance(done: int, total: int) -> None:
        progress.advance(done / total)

    if isinstance(source, Backend):
        results, unplaced = source.evaluate(placements, advance), None
        interrupted = getattr(source, "interrupted", False)
    else:
        predicted_s = [candidates[i].predicted_s for i in chosen]
        with source.backend(problem, predicted_s) as backend:
            results, unplaced = backend.evaluate_with_unplaced(placements, advance)
            interrupted = backend.interrupted
    measured = list(candidates)
    for i, measurement in zip(chosen, measurements(results), strict=True):
        if measurement.counts:
            measured[i] = replace(candidates[i], measurement=measurement)
    return Runs(candidates=measured, all_cores=unplaced, interrupted=interrupted)


def overfull(candidates: Sequence[Candidate]) -> bool:
    """Return whether all candidates that ran on several devices ran out of memory."""
    several = [own.measurement for own in candidates if own.measurement and not own.is_single]
    return bool(several) and all(measurement.overfull for measurement in several)


def with_less_memory(problem: Problem, share: float) -> Problem:
    """Return the problem with a share of each device's memory."""
    devices = tuple(
        replace(device, memory_bytes=int(device.memory_bytes * share))
        for device in problem.cluster.devices
    )
    return Problem.of(problem.graph, replace(problem.cluster, devices=devices))


def worth_running(candidates: Sequence[Candidate], cluster: Cluster) -> list[int]:
    """Return indices of candidates to run: best single device of each kind and best others.

    A warm start is always run.
    """
    feasible = [i for i, own in enumerate(candidates) if np.isfinite(own.predicted_s)]
    by_time = sorted(feasible, key=lambda i: candidates[i].predicted_s)
    singles: dict[str, int] = {}
    for i in by_time:
        if candidates[i].is_single:
            singles.setdefault(cluster.devices[candidates[i].devices[0]].kind, i)
    others = [i for i in by_time if not candidates[i].is_single]
    chosen = [*singles.values(), *others[:MEASURED_CANDIDATES]]
    warm_starts = [i for i in by_time if candidates[i].kind is Kind.WARM_START]
    return chosen + [i for i in warm_starts if i not in chosen]
