"""The simulated step of a report: bars, transfers, critical path, idle times, memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np

from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Schedule, Simulated
from envs.simulator.critical_path import Idle, Stretch, critical_path, idle_times
from envs.simulator.micro_batches import Pipeline
from envs.simulator.trace import link_tracks, memory_curves

MOST_POINTS: Final = 8_000
"""Points of all memory curves together: more would be invisible and enlarge the file."""
WAITINGS: Final = ("producer", "link busy", "transfer", "nothing left", "host busy")
STRETCHES: Final = ("compute", "link busy", "transfer", "host busy")


def timeline_data(simulated: Simulated, placement: Placement) -> dict[str, Any]:
    """Return the step as columns; a bar is an op, or its copy for a micro-batch.

    ::

        {"step_ns": int,
         "bars": {"op": [index of op], "batch": [micro-batch], "start_ns", "end_ns"},
         "transfers": {"bar": [sender], "from": [device], "to": [device], "bytes",
                       "request_ns", "start_ns", "end_ns"},
         "tracks": [{"title": str, "transfers": [index of transfer]}],
         "critical": {"kind": [index into "kinds"], "kinds", "bar", "from": [device], "to",
                      "start_ns", "end_ns"},
         "idle": {"device", "why": [index into "whys"], "whys", "start_ns", "end_ns",
                  "producer": [bar or -1], "reader": [bar or -1], "holder": [bar or -1]},
         "memory": [{"at_ns", "bytes", "peak_bytes", "limit_bytes"}]}     # by device

    The critical path is contiguous from 0 to the end; bars and idle times of a device fill the
    step. The memory curve is thinned but keeps its maximum.
    """
    problem, schedule = simulated.run(placement)
    if schedule.step_ns == INFEASIBLE_NS:
        raise ValueError(f"there is no report of a placement that cannot run: {schedule.reason}")
    origin, batch = _origins(simulated.problem, placement)
    sent = schedule.transfers
    return {
        "step_ns": schedule.step_ns,
        "bars": {
            "op": origin.tolist(),
            "batch": batch.tolist(),
            "start_ns": schedule.start_ns.tolist(),
            "end_ns": schedule.end_ns.tolist(),
        },
        "transfers": {
            "bar": sent.producer.tolist(),
            "from": sent.source.tolist(),
            "to": sent.destination.tolist(),
            "bytes": sent.bytes.tolist(),
            "request_ns": sent.request_ns.tolist(),
            "start_ns": sent.start_ns.tolist(),
            "end_ns": sent.end_ns.tolist(),
        },
        "tracks": [
            {"title": title, "transfers": transfers}
            for title, transfers in link_tracks(problem, schedule).items()
        ],
        "critical": _critical(critical_path(problem, schedule)),
        "idle": _idle(idle_times(problem, schedule)),
        "memory": _memory(problem, schedule),
    }


def _origins(problem: Problem, placement: Placement) -> tuple[Any, Any]:
    """Return op and micro-batch of every bar; a gate counts as the op that it precedes."""
    if placement.micro_batches == 1:
        return np.arange(problem.op_count), np.zeros(problem.op_count, np.int64)
    copies = Pipeline(problem, placement.micro_batches, in_flight=placement.in_flight)
    return copies.origin, copies.batch


def _critical(path: list[Stretch]) -> dict[str, list[Any]]:
    return {
        "kinds": list(STRETCHES),
        "kind": [STRETCHES.index(part.kind) for part in path],
        "bar": [part.op for part in path],
        "from": [part.source for part in path],
        "to": [part.destination for part in path],
        "start_ns": [part.start_ns for part in path],
        "end_ns": [part.end_ns for part in path],
    }


def _idle(idles: list[Idle]) -> dict[str, list[Any]]:
    return {
        "whys": list(WAITINGS),
        "why": [WAITINGS.index(idle.waiting) for idle in idles],
        "device": [idle.device for idle in idles],
        "start_ns": [idle.start_ns for idle in idles],
        "end_ns": [idle.end_ns for idle in idles],
        "producer": [idle.producer for idle in idles],
        "reader": [idle.reader for idle in idles],
        "holder": [-1 if idle.holder is None else idle.holder.op for idle in idles],
    }


def _memory(problem: Problem, schedule: Schedule) -> list[dict[str, Any]]:
    most = max(MOST_POINTS // problem.device_count, 2)
    curves = []
    for d, curve in enumerate(memory_curves(problem, schedule)):
        shown = thinned(curve, most)
        curves.append(
            {
                "at_ns": [at for at, _ in shown],
                "bytes": [used for _, used in shown],
                "peak_bytes": int(schedule.peak_bytes[d]),
                "limit_bytes": int(problem.memory_bytes[d]),
            }
        )
    return curves


def thinned(curve: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Return at most ``most`` (2 or more) points of a curve: the largest and last of each stretch.

    >>> thinned([(0, 1), (1, 9), (2, 3), (3, 4)], 2)
    [(1, 9), (3, 4)]
    """
    if len(curve) <= most:
        return curve
    kept: list[tuple[int, int]] = []
    cuts = np.linspace(0, len(curve), most // 2 + 1).astype(int).tolist()
    for begin, end in pairwise(cuts):
        stretch = curve[begin:end]
        kept += dict.fromkeys([max(stretch, key=lambda point: point[1]), stretch[-1]])
    return kept
