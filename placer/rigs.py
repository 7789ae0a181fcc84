"""What the main job needs of devices: what can be placed on them, its costs, a backend to run it.

Pinned cores run the joint graph op by op in workers, torch's own devices the calls of the exported
forward pass in this process, or the model's own code module by module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from graphs.extract.module_map import placeable
from placer.costing import costed_graph
from placer.report.progress import Progress

MEASURED_S: Final = 1.5
FEWEST_ROUNDS: Final = 7
MOST_ROUNDS: Final = 41


class MeasuringBackend(Protocol):
    """Runs placements for real, in turn."""

    interrupted: bool
    reference: Measurement | None

    def measure(
        self,
        placements: Sequence[Placement],
        progress: Callable[[int, int], None] | None = None,
        *,
        reference: bool = False,
    ) -> list[Measurement]:
        """See :meth:`envs.measured.Measured.measure`."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class Rig(Protocol):
    """How an extraction is placed on one sort of devices."""

    graph: nx.DiGraph[str]
    runs: bool  # whether there is a backend for what was extracted

    def costed(
        self, graph: nx.DiGraph[str], cluster: Cluster, hear: Progress, *, fresh: bool = False
    ) -> nx.DiGraph[str]:
        """A copy of ``graph``, which has the same ops, with seconds for every kind of device."""
        ...

    def planned(self, cluster: Cluster) -> Cluster:
        """The cluster with the memory that placements may count on."""
        ...

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """All ops in the order that placements ask for, from what was simulated."""
        ...

    def backend(self, problem: Problem, longest_s: float, shortest_s: float) -> MeasuringBackend:
        """What runs candidates whose steps are predicted to take between these times."""
        ...


def rig_for(extraction: Extraction, cluster: Cluster, *, overlap: bool = False) -> Rig:
    """The rig for the devices of a cluster; what is elsewhere is simulated op by op, as cores are.

    Raises:
        ExtractionError: devices of torch cannot run what was extracted.
        ValueError: copies are to overlap with compute where they cannot.
    """
    on_torch = not any(map(is_core, cluster.names)) and all(map(is_here, cluster.names))
    if on_torch:
        return TorchDevices(extraction, cluster, overlap=overlap)
    if overlap:
        check_overlap(cluster.names, None)
    return Cores(extraction, cluster)


class Cores:
    """Pinned cores: every op can be placed."""

    def __init__(self, extraction: Extraction, cluster: Cluster) -> None:
        self.extraction = extraction
        self.graph = extraction.graph
        self.runs = extraction.own_program is not None
        self.limits = {device.name: device.memory_bytes for device in cluster.devices}

    def costed(
        self, graph: nx.DiGraph[str], cluster: Cluster, hear: Progress, *, fresh: bool = False
    ) -> nx.DiGraph[str]:
        """Costs in context, by the clocks of the workers; without ``fresh`` known ones count."""
        return costed_graph(self.extraction, graph, cluster, hear, fresh=fresh)

    def planned(self, cluster: Cluster) -> Cluster:
        """All its memory."""
        return cluster

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """By start."""
        return run_order(problem, schedule.start_ns)

    def backend(self, problem: Problem, longest_s: float, shortest_s: float) -> MeasuringBackend:
        """Workers."""
        return Measured(
            self.extraction,
            problem,
            limits=self.limits,
            latency_s=max((link.latency_s for link in problem.cluster.links), default=0.0),
            rounds=rounds_for(shortest_s),
            step_timeout_s=60.0 + 100.0 * longest_s,
        )


class TorchDevices:
    """``cuda:*`` and ``cpu``: every call can be placed, its backward goes with it.

    Of a graph of modules every module can.
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
        """Costs of every call alone, of modules in context; without ``fresh`` known ones count."""
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
        """Some of its memory is left for gaps and libraries."""
        return plannable(cluster)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """By start, but those of the CPU by their end."""
        return launch_order(problem, schedule)

    def backend(self, problem: Problem, longest_s: float, shortest_s: float) -> MeasuringBackend:
        """A placed or hooked module in this process."""
        del shortest_s  # its turns are as long as its steps need
        return MeasuredModule(
            self.extraction,
            self.calls,
            problem,
            limits=self.limits,
            turn_timeout_s=600.0 + 300.0 * longest_s,
            overlap=self.overlap,
        )


def rounds_for(step_s: float) -> int:
    """How often a candidate is run: short steps scatter more, and cost less."""
    return int(min(max(MEASURED_S / step_s, FEWEST_ROUNDS), MOST_ROUNDS)) if step_s else MOST_ROUNDS
