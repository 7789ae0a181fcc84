"""A model as a placement problem on devices of this machine, and the backend that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envs.calibrate import calibrated, calibrated_before
from envs.call_memory import plannable
from envs.cluster import Cluster
from envs.discover import discover
from envs.host_names import is_core
from envs.known_calls import call_costs, known_call_costs
from envs.measured import Measured
from envs.measured_module import MeasuredModule
from envs.op_costs import OpCosts, known_op_costs, op_costs
from envs.overlap import check_overlap
from envs.problem import Problem
from graphs.costs import with_costs
from graphs.extract import Extraction, Step, extract
from graphs.extract.call_graph import CallGraph
from graphs.extract.module_map import ModuleMap, placeable
from graphs.graph import GraphArrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelProblem:
    """The problem of placing a step, with costs measured on its devices.

    Pinned cores run it op by op, and ``calls`` is None; torch devices run its ``calls``, exported
    ones or those of its modules.
    """

    problem: Problem
    extraction: Extraction
    calls: CallGraph | ModuleMap | None
    limits: Mapping[str, int]  # {device name: bytes}

    @classmethod
    def of(
        cls,
        step: Step,
        devices: str | Cluster = "auto",
        memory: Mapping[str, int] | None = None,
    ) -> ModelProblem:
        """Extract a step and measure the costs of its ops, except for those in the cache.

        Args:
            step: the model and its example inputs.
            devices: names as for :func:`envs.discover.discover`, or a cluster of devices of this
                machine; speeds and links that a cluster lacks are measured.
            memory: {device name: bytes} that placements may use on each device, if devices are
                given by name.

        Raises:
            ExtractionError: the model cannot be extracted, or torch devices cannot run it.
            ValueError: there is no such device, or a limit exceeds its memory.
            WorkerError: an op cannot run on a device.
        """
        named = devices if isinstance(devices, Cluster) else discover(devices, memory)
        return cls.of_extraction(extract(step), named)

    @classmethod
    def of_extraction(cls, extraction: Extraction, cluster: Cluster) -> ModelProblem:
        """Build the problem of :meth:`of` from a step that is already extracted.

        Raises:
            ExtractionError: torch devices cannot run it.
            ValueError: a device does not exist on this machine.
            WorkerError: an op cannot run on a device.
        """
        cluster = calibrated(cluster)
        if is_core(cluster.names[0]):
            return cls._costed(extraction, None, cluster, op_costs(extraction, cluster))
        calls = placeable(extraction)
        costs = call_costs(extraction, calls, cluster)
        return cls._costed(extraction, calls, cluster, costs)

    @classmethod
    def known(cls, extraction: Extraction, cluster: Cluster) -> ModelProblem | None:
        """Build the problem from cached costs; None if anything would have to be measured.

        Raises:
            ExtractionError: torch devices cannot run it.
            ValueError: a device does not exist on this machine.
        """
        before = calibrated_before(cluster)
        if before is None:
            return None
        calls = None if is_core(cluster.names[0]) else placeable(extraction)
        costs = (
            known_op_costs(extraction, before)
            if calls is None
            else known_call_costs(extraction, calls, before)
        )
        return None if costs is None else cls._costed(extraction, calls, before, costs)

    @classmethod
    def _costed(
        cls,
        extraction: Extraction,
        calls: CallGraph | ModuleMap | None,
        cluster: Cluster,
        costs: Mapping[str, OpCosts],
    ) -> ModelProblem:
        limits = {device.name: device.memory_bytes for device in cluster.devices}
        graph = extraction.graph if calls is None else calls.graph
        cluster = cluster if calls is None else plannable(cluster)
        costed = with_costs(
            graph,
            {kind: known.cost_s for kind, known in costs.items()},
            {kind: known.sources for kind, known in costs.items()},
        )
        problem = Problem.of(GraphArrays.from_graph(costed), cluster)
        return cls(problem=problem, extraction=extraction, calls=calls, limits=limits)

    def measured(self, *, rounds: int, overlap: bool = False) -> Measured | MeasuredModule:
        """Return the backend that runs placements of this problem; close it after use.

        Args:
            rounds: counted runs of every placement.
            overlap: run placements with copies that overlap with compute.

        Raises:
            ValueError: copies cannot overlap on these devices.
            WorkerError: the workers do not start.
            OSError: there is too little memory, or too many processes or open files.
        """
        if overlap:
            check_overlap(self.problem.cluster.names, self.calls)
        if self.calls is None:
            return Measured(self.extraction, self.problem, limits=self.limits, rounds=rounds)
        return MeasuredModule(
            self.extraction,
            self.calls,
            self.problem,
            limits=dict(self.limits),
            rounds=rounds,
            overlap=overlap,
        )
