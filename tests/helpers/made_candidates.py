"""Candidates of a graph of two ops with set times, and results of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import placer
from envs.hardware.cluster import Cluster, Device
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import GraphArrays, add_op, new_graph
from placer.choose import choose
from placer.result import Result
from placer.search.candidate import Candidate, Kind, Prediction
from tests.helpers.clusters import toy_pair

PAIR = toy_pair("a", "b")


def two_ops() -> placer.Graph:
    graph = new_graph("two")
    for op_id in ("x", "y"):
        add_op(graph, op_id, cost_s={"*": 1.0})
    return graph


TWO_OPS = GraphArrays.from_graph(two_ops())
ANNEALING, HEFT, SPLIT, SINGLE, UNPLACED = (
    Kind.ANNEALING,
    Kind.HEFT,
    Kind.LAYER_SPLIT,
    Kind.SINGLE_DEVICE,
    Kind.UNPLACED,
)


def candidate(
    kind: Kind,
    predicted_s: float,
    runs_s: list[float] | None = None,
    *,
    name: str = "",
    why: str = "a needs 2 B but has 1 B",
    missing_bytes: int = 0,
) -> Candidate:
    """Return a candidate of two ops with these measurements; CPU-clock time equals wall time."""
    devices = np.array((0, 0) if kind is Kind.SINGLE_DEVICE else (0, 1), np.int32)
    priority = np.array((1.0, 0.0))
    measurement = None
    if runs_s is not None:
        times = np.array(runs_s)
        measurement = Measurement(wall_s=times, cpu_clock_s=times, failure="" if runs_s else "died")
    return Candidate(
        kind=kind,
        name=name or kind.value,
        devices=devices,
        priority=priority,
        step_ns=0,
        prediction=Prediction(
            placement=Placement.of(TWO_OPS, PAIR, devices, priority),
            objective_s=predicted_s,
            peak_memory_bytes={"a": 1, "b": 1},
            why="" if np.isfinite(predicted_s) else why,
            missing_bytes=missing_bytes,
        ),
        measurement=measurement,
    )


def unplaced(device: str, wall_s: float, cpu_clock_s: float | None = None) -> Candidate:
    """Return the unplaced model on a core or several, with these times in three runs."""
    times = np.full(3, wall_s)
    whole = np.zeros(2, np.int32)
    cluster = Cluster(name="one", devices=(Device(name=device, kind="x", memory_bytes=10),))
    made = candidate(UNPLACED, 1.0, [wall_s] * 3, name=f"unplaced {device}")
    assert made.prediction is not None
    placement = Placement.of(TWO_OPS, cluster, whole, made.priority)
    return replace(
        made,
        devices=whole,
        prediction=replace(made.prediction, placement=replace(placement, unplaced=True)),
        measurement=Measurement(wall_s=times, cpu_clock_s=np.full(3, cpu_clock_s or wall_s)),
    )


def busy(kind: Kind, cpu_clock_s: float) -> Candidate:
    """Return a candidate that other processes slowed down to half of its speed."""
    made = candidate(kind, cpu_clock_s, [2 * cpu_clock_s] * 3)
    assert made.measurement is not None
    return replace(made, measurement=replace(made.measurement, cpu_clock_s=np.full(3, cpu_clock_s)))


def failed(made: Candidate) -> Candidate:
    """Return a candidate that failed when it was run."""
    assert made.measurement is not None
    return replace(made, measurement=replace(made.measurement, failure="it died"))


def by_clocks(made: Candidate, cpu_clock_s: float, wall_s: float) -> Candidate:
    """Return a candidate with these times in three runs."""
    measurement = Measurement(wall_s=np.full(3, wall_s), cpu_clock_s=np.full(3, cpu_clock_s))
    return replace(made, measurement=measurement)


def result_of(candidates: list[Candidate]) -> Result:
    """Return a result of two ops with these candidates."""
    best = choose(candidates)
    return Result(
        placement=best.placement,
        problem=Problem.of(TWO_OPS, PAIR),
        candidates=tuple(candidates),
        best=best,
        lower_bound_s=1.0,
        search_s=0.0,
        stopped=False,
    )
