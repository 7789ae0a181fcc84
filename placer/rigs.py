"""Runtimes: which ops can be placed on a kind of device, their costs, and a backend to run them.

Pinned cores run the joint graph op by op in worker processes. Torch devices run the calls of the
exported forward pass in this process, or the model's own code module by module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import networkx as nx

from envs.call_memory import plannable
from envs.cluster import Cluster
from envs.discover import is_here
from envs.host_names import is_core
from envs.known_calls import call_costs
from envs.measured import Measured
from envs.measured_module import MeasuredModule, launch_order
from envs.measurement import Measurement
from envs.overlap import check_overlap
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator.schedule import Schedule, run_order
from graphs.costs import with_costs
from graphs.extract import Extraction
from graphs.extract.call_graph import CallGraph
from graphs.extract.gradient_makers import gradient_makers
from graphs.extract.module_map import placeable
from placer.costing import costed_graph
from placer.report.progress import Progress

MEASURED_S: Final = 1.5
FEWEST_ROUNDS: Final = 7
MOST_ROUNDS: Final = 41


class MeasuringBackend(Protocol):
    """Runs placements in turn and measures their step times."""

    interrupted: bool
    reference: Measurement | None

    def measure(
        self,
        placements: Sequence[Placement],
        progress: Callable[[int, int], None] | None = None,
        *,
        reference: bool = False,
    ) -> list[Measurement]:
        """Measure placements; see :meth:`envs.measured.Measured.measure`."""
        ...

    def close(self) -> None:
        """Release the workers, or the copy of the model."""
        ...


class Rig(Protocol):
    """The runtime of one kind of devices: what can be placed there, its costs and a backend."""

    graph: nx.DiGraph[str]
    runs: bool  # whether there is a backend for the extraction

    def costed(
        self, graph: nx.DiGraph[str], cluster: Cluster, hear: Progress, *, fresh: bool = False
    ) -> nx.DiGraph[str]:
        """Return a copy of ``graph``, which has the same ops, with costs for every device kind."""
        ...

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the memory that placements may use."""
        ...

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return all ops in execution order, from a simulated schedule."""
        ...

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return {id with parameters: ids that compute their gradients} of the graph."""
        ...

    def backend(self, problem: Problem, longest_s: float, shortest_s: float) -> MeasuringBackend:
        """Return a backend for candidates with predicted step times between these."""
        ...


def rig_for(extraction: Extraction, cluster: Cluster, *, overlap: bool = False) -> Rig:
    """Return the runtime for the devices of a cluster.

    Devices that are not on this machine are simulated op by op, like cores.

    Raises:
        ExtractionError: torch devices cannot run the extraction.
        ValueError: ``overlap`` is set, but copies cannot overlap on these devices.
    """
    on_torch = not any(map(is_core, cluster.names)) and all(map(is_here, cluster.names))
    if on_torch:
        return TorchDevices(extraction, cluster, overlap=overlap)
    if overlap:
        check_overlap(cluster.names, None)
    return Cores(extraction, cluster)


class Cores:
    """The runtime of pinned cores: every op can be placed."""

    def __init__(self, extraction: Extraction, cluster: Cluster) -> None:
        self.extraction = extraction
        self.graph = extraction.graph
        self.runs = extraction.own_program is not None
        self.limits = {device.name: device.memory_bytes for device in cluster.devices}

    def costed(
        self, graph: nx.DiGraph[str], cluster: Cluster, hear: Progress, *, fresh: bool = False
    ) -> nx.DiGraph[str]:
        """Return the graph with op costs measured in context by the workers, or cached ones."""
        return costed_graph(self.extraction, graph, cluster, hear, fresh=fresh)

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with all its memory."""
        return cluster

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time."""
        return run_order(problem, schedule.start_ns)

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the ops that compute the gradients of each op's parameters."""
        return gradient_makers(self.extraction)

    def backend(self, problem: Problem, longest_s: float, shortest_s: float) -> MeasuringBackend:
        """Return a backend of worker processes."""
        return Measured(
            self.extraction,
            problem,
            limits=self.limits,
            latency_s=max((link.latency_s for link in problem.cluster.links), default=0.0),
            rounds=rounds_for(shortest_s),
            step_timeout_s=60.0 + 100.0 * longest_s,
        )


class TorchDevices:
    """The runtime of ``cuda:*`` and ``cpu``: every call can be placed, its backward runs with it.

    Of a module graph, every module can be placed.
    """

    runs = True

    def __init__(self, extraction: Extraction, cluster: Cluster, *, overlap: bool = False) -> None:
        self.extraction = extraction
        self.calls = placeable(extraction)
        self.overlap = overlap
        if overlap:
            check_overlap(cluster.names, self.calls)
        self.graph = self.calls.graph
        self.limits = {device.name: device.memory_bytes for device in cluster.devices}

    def costed(
        self, graph: nx.DiGraph[str], cluster: Cluster, hear: Progress, *, fresh: bool = False
    ) -> nx.DiGraph[str]:
        """Return the graph with costs of calls alone, of modules in context, or cached ones."""
        costs = call_costs(
            self.extraction,
            self.calls,
            cluster,
            fresh=fresh,
            progress=lambda done, total: hear.advance(done / total),
        )
        return with_costs(
            graph,
            {kind: known.cost_s for kind, known in costs.items()},
            {kind: known.sources for kind, known in costs.items()},
        )

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with some memory reserved for fragmentation and libraries."""
        return plannable(cluster)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time, those on the CPU by end time."""
        return launch_order(problem, schedule)

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the calls that compute the gradients of each call's parameters."""
        calls = self.calls if isinstance(self.calls, CallGraph) else None
        return gradient_makers(self.extraction, calls)

    def backend(self, problem: Problem, longest_s: float, shortest_s: float) -> MeasuringBackend:
        """Return a backend that runs a placed or hooked module in this process."""
        del shortest_s  # its turns adapt to the step time
        return MeasuredModule(
            self.extraction,
            self.calls,
            problem,
            limits=self.limits,
            turn_timeout_s=600.0 + 300.0 * longest_s,
            overlap=self.overlap,
        )


def rounds_for(step_s: float) -> int:
    """Return how often a candidate is run: short steps are noisier and cheaper to repeat."""
    return int(min(max(MEASURED_S / step_s, FEWEST_ROUNDS), MOST_ROUNDS)) if step_s else MOST_ROUNDS
