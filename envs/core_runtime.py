"""The runtime of pinned cores: worker processes run the joint graph op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Final

from envs.backend import Evaluation, ProgressCallback, measurements
from envs.costs.cached_costs import OpCosts, first_of_kinds
from envs.costs.ops import core_costs, known_core_costs
from envs.costs.roofline import SOURCE, check_cluster, roofline_costs
from envs.executors.cores.lists import priority_order
from envs.executors.cores.placed import PlacedModel
from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_local_core_set, present
from envs.measured.core_backend import Measured
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator.schedule import Schedule, run_order
from graphs.extract import Extraction
from graphs.extract.placeable import gradient_makers
from graphs.graph import GraphArrays

MEASURED_S: Final = 1.5
FEWEST_ROUNDS: Final = 7
MOST_ROUNDS: Final = 41


class CoreRuntime:
    """The runtime of pinned cores: every op can be placed.

    It also simulates clusters with devices that are not on this machine.
    """

    def __init__(self, extraction: Extraction, cluster: Cluster) -> None:
        self.extraction = extraction
        self.graph = extraction.graph
        self.runs = extraction.own_program is not None
        self.limits = {device.name: device.memory_bytes for device in cluster.devices}

    def costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> dict[str, OpCosts]:
        """Return costs measured in context by the workers, or cached ones.

        Kinds without a core set on this machine get a roofline estimate from their rates.
        """
        check_cluster(cluster)
        here = first_of_kinds([own for own in cluster.devices if is_local_core_set(own.name)])
        described = [device for device in cluster.devices if device.kind not in here]
        costs = core_costs(self.extraction, here, fresh=fresh, progress=progress) if here else {}
        for kind, cost_s in roofline_costs(self.graph, described).items():
            costs[kind] = OpCosts.of_one_source(cost_s, SOURCE)
        return costs

    def known_costs(self, cluster: Cluster) -> dict[str, OpCosts] | None:
        """Return the cached costs on cores of this machine, None unless all ops are cached."""
        return known_core_costs(self.extraction, first_of_kinds(cluster.devices))

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with all its memory."""
        return cluster

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the ops that compute the gradients of each op's parameters."""
        return gradient_makers(self.extraction)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time."""
        return run_order(problem, schedule.start_ns)

    def backend(
        self, problem: Problem, predicted_s: Sequence[float] = (), *, rounds: int | None = None
    ) -> Measured:
        """Return a backend of worker processes."""
        return Measured(
            self.extraction,
            problem,
            limits=self.limits,
            latency_s=max((link.latency_s for link in problem.cluster.links), default=0.0),
            rounds=rounds or rounds_for(predicted_s[0] if predicted_s else 0.0),
            step_timeout_s=60.0 + 100.0 * max(predicted_s, default=0.0),
        )

    def measure(
        self,
        problem: Problem,
        placements: Sequence[Placement],
        predicted_s: Sequence[float],
        progress: ProgressCallback | None = None,
    ) -> Evaluation:
        """Run placements in turn, then the unplaced step on all cores."""
        with closing(self.backend(problem, predicted_s)) as backend:
            done = backend.runs_each * len(placements)
            total = done + backend.runs_each * (problem.device_count > 1)

            def report(runs: int, _: int, before: int = 0) -> None:
                if progress is not None:
                    progress(before + runs, total)

            results = backend.evaluate(placements, report)
            unplaced = None
            if not backend.interrupted:
                unplaced = backend.measure_unplaced(lambda runs, of: report(runs, of, done))
            return Evaluation(
                measurements=measurements(results),
                unplaced=unplaced,
                interrupted=backend.interrupted,
            )

    def apply(self, placement: Placement) -> PlacedModel:
        """Return the placed model; its workers run until it is closed."""
        cluster = present(placement.device_names)
        fitting = placement.aligned(GraphArrays.from_graph(self.graph), cluster)
        order = priority_order(self.extraction.program, fitting.priority)
        return PlacedModel(self.extraction, cluster, fitting.devices, order)


def rounds_for(step_s: float) -> int:
    """Return how often a placement is run: short steps are noisier and cheaper to repeat."""
    return int(min(max(MEASURED_S / step_s, FEWEST_ROUNDS), MOST_ROUNDS)) if step_s else MOST_ROUNDS
