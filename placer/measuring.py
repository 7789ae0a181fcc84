"""The predicted and the measured step time of an existing placement."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from envs.backend import StepResult, measurements
from envs.hardware.cluster import Cluster
from envs.measurement import Measurement, contended, noise
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import calibrated, costed, runtime_for
from envs.simulator import Simulated
from graphs.extract import AUTO, Workload, extract
from graphs.extract.eager import check_has_memory
from graphs.graph import GraphArrays
from placer.device_map import DeviceMap
from placer.progress import Progress, Silent
from placer.warm_start import WarmStart, placement_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A placement with its predicted step and its measurement."""

    placement: Placement
    predicted: StepResult
    measurement: Measurement
    cost_source: Mapping[str, str]  # {device kind: source of its op costs}
    conflict: str = ""  # why accelerate could not run the device map

    @property
    def loaded(self) -> bool:
        """Return whether the machine was loaded during the runs; CPU-clock times count then."""
        return contended([self.measurement])

    @property
    def step_s(self) -> float:
        """Return the measured step time; inf if the placement could not be run."""
        return self.measurement.step_s(contended=self.loaded)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data for JSON."""
        seen, predicted = self.measurement, self.predicted
        return {
            "predicted": {
                "step_s": predicted.step_s if predicted.feasible else None,
                "feasible": predicted.feasible,
                "why": predicted.why,
                "peak_memory_bytes": dict(predicted.peak_memory_bytes),
            },
            "measured": {
                "step_s": self.step_s,
                **noise(seen),
                "rounds": len(seen.wall_s),
                "peak_memory_bytes": dict(seen.peak_memory_bytes),
            }
            if seen.ok
            else None,
            "failure": seen.failure,
            "remarks": [self.conflict] if self.conflict else [],
            "cost_source": dict(self.cost_source),
        }


def score(
    step: Workload,
    start: WarmStart,
    cluster: Cluster,
    *,
    fresh: bool = False,
    extractor: str = AUTO,
    overlap: bool = False,
    progress: Progress | None = None,
) -> Score:
    """Predict and run one step as placed, in the way :func:`placer.optimize` runs candidates.

    Args:
        step: the model and its example inputs.
        start: a placement of its ops, or a device map of its modules.
        cluster: devices of this machine; speeds are calibrated.
        fresh: measure devices and ops again and ignore the cache.
        extractor: how the graph is extracted.
        overlap: run with copies that overlap compute.
        progress: receives progress.

    Raises:
        ExtractionError: the model cannot be extracted, or its extraction cannot be run.
        WarmStartError: the placement belongs to another model or has other devices.
        ValueError: copies cannot overlap on these devices.
        WorkerError: the workers do not start.
    """
    hear = progress or Silent()
    check_has_memory(step)
    hear.stage("Extracting the graph")
    extraction = extract(step, extractor)
    runtime = runtime_for(extraction, cluster, overlap=overlap)
    placement = placement_of(start, extraction, GraphArrays.from_graph(runtime.graph), cluster)
    hear.stage("Calibrating devices")
    cluster = calibrated(cluster, again=fresh)

    def advance(done: int, total: int) -> None:
        hear.advance(done / total)

    hear.stage("Measuring op costs")
    graph = costed(runtime, runtime.graph, cluster, fresh=fresh, progress=advance)
    problem = Problem.of(GraphArrays.from_graph(graph), runtime.planned(cluster))
    [predicted] = Simulated(problem).evaluate([placement])
    expected_s = predicted.step_s if predicted.feasible else 1.0
    hear.stage("Running it for real")
    with closing(runtime.backend(problem, [expected_s])) as backend:
        [seen] = measurements(backend.evaluate([placement], advance))
    if not seen.counts:
        raise KeyboardInterrupt
    return Score(
        placement=placement,
        predicted=predicted,
        measurement=seen,
        cost_source=graph.graph["cost_source"],
        conflict=start.conflict(extraction) if isinstance(start, DeviceMap) else "",
    )
