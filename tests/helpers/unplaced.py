"""The unplaced model beside the candidates of a result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envs.core_runtime.executor import alone
from envs.hardware.cluster import Device
from envs.measurement import Measurement
from envs.placement import Placement
from placer.result import Result
from placer.search.candidate import Candidate, Kind, Prediction


def with_unplaced(result: Result, runs: Measurement) -> Result:
    """Return the result with these runs of the unplaced model as its last candidate."""
    graph = result.problem.graph
    cluster = alone(Device(name="core:0-1", kind="core*2", memory_bytes=10**9))
    devices, priority = np.zeros(len(graph), np.int32), -np.arange(len(graph), dtype=np.float64)
    candidate = Candidate(
        kind=Kind.UNPLACED,
        name=Kind.UNPLACED.value,
        devices=devices,
        priority=priority,
        step_ns=1,
        prediction=Prediction(
            placement=Placement.of(graph, cluster, devices, priority),
            objective_s=1.0,
            peak_memory_bytes={"core:0-1": 1},
        ),
        measurement=runs,
    )
    return replace(result, candidates=(*result.candidates, candidate))
