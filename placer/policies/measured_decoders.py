"""Costs of scheduler weights on real devices: reward of a training with measured steps.

The devices are those of this machine, or sets of devices of the same kinds on a Ray cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.backend import measurements
from envs.executors.cores.errors import WorkerError
from envs.hardware.cluster import Cluster
from envs.hardware.discover import check_devices
from envs.measured import Measured
from envs.measurement import Measurement, contended, tied
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.runtime import Runtime, calibrated, costed, extraction_for, runtime_for
from envs.simulator import INFEASIBLE_NS, OVERFULL_NS, Simulator
from graphs.extract import ExtractionError, Workload
from graphs.extract.eager import check_has_memory
from graphs.graph import GraphArrays
from placer.policies.pool import CANNOT_RUN, Exercise, exercise, is_reference
from placer.ray_cluster.connection import RayCluster
from placer.ray_cluster.measuring import MeasuringNodes
from placer.ray_cluster.node_step import NodeStep, Runs
from placer.search.compilation import load_compiled_code
from placer.startup import VERSION

GROUP_SIZE: Final = 16
"""Placements that are run in the same rounds; more would be far apart from their reference."""
GROUP_SIZE_ON_NODES: Final = 2
"""Placements in a group that runs on one of several nodes, where groups run side by side."""
NO_TIME: Final = "its time is no number"


class Measuring(Protocol):
    """Runs groups of placements, each in the same rounds of the same devices."""

    @property
    def group_size(self) -> int:
        """Return the number of placements, beside their reference, that a group should have."""
        ...

    def measure(self, groups: Sequence[Sequence[Placement]]) -> list[list[Measurement]]:
        """Return the measurements of each group."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...


class OnThisMachine:
    """Runs one group after the other on a backend."""

    group_size: int = GROUP_SIZE

    def __init__(self, backend: Measured) -> None:
        self._backend = backend

    def measure(self, groups: Sequence[Sequence[Placement]]) -> list[list[Measurement]]:
        """See :class:`Measuring`."""
        found = []
        for group in groups:
            found.append(measurements(self._backend.evaluate(group)))
            if self._backend.interrupted:
                raise KeyboardInterrupt
        return found

    def close(self) -> None:
        """Stop the workers."""
        self._backend.close()


class OnNodes:
    """Runs groups side by side on the nodes of a Ray cluster."""

    group_size: int = GROUP_SIZE_ON_NODES

    def __init__(self, cluster: RayCluster, nodes: MeasuringNodes, runs: Runs) -> None:
        """Measure on nodes of a cluster that have loaded the step."""
        self._cluster = cluster
        self._nodes = nodes
        self._runs = runs

    def measure(self, groups: Sequence[Sequence[Placement]]) -> list[list[Measurement]]:
        """See :class:`Measuring`."""
        return self._nodes.measure(groups, self._runs)

    def close(self) -> None:
        """Stop the workers of all nodes, and disconnect."""
        self._nodes.close()
        self._cluster.close()


class MeasuredDecoders:
    """Decoders that measure the placements of one problem on its devices.

    A cost is the reference's step time times the measured ratio to it. The reference is the fastest
    measured one of single device, HEFT and ETF, and runs in the same rounds as every placement;
    within noise of it the ratio is 1. So neither the machine's load nor its noise is rewarded. A
    placement is measured once. ``item`` is the problem with measured step times of its heuristics,
    ``measured`` counts the placements that were run by node, "" for this machine.
    """

    def __init__(self, item: Exercise, runtime: Runtime, devices: Measuring) -> None:
        """Measure the heuristics; the devices are released with the decoders."""
        self.evaluator = item.evaluator
        self._problem = item.evaluator.problem
        self._simulator = Simulator(self._problem, memory=False)
        self._runtime = runtime
        self._devices = devices
        self._ratios: dict[bytes, float] = {}
        self.measured: Counter[str] = Counter()
        known = [c for c in item.known if is_reference(c)]
        fitting = [c for c in known if c.step_ns < OVERFULL_NS]
        placements = [self._placement(c.devices, c.priority) for c in fitting]
        runs = self._heuristics([placement for _, placement in placements])
        busy = contended([run for run in runs if run.ok])
        steps_s = [run.step_s(contended=busy) for run in runs]
        best = int(np.argmin(steps_s))
        if not runs[best].ok:
            raise WorkerError(f"{fitting[best].name} cannot be run: {runs[best].failure}")
        self._reference = placements[best][1]
        self._remember([key for key, _ in placements], runs, runs[best])
        reference_ns = max(round(steps_s[best] * 1e9), 1)
        measured_ns = {
            id(c): round(reference_ns * self._ratios[key])
            for c, (key, _) in zip(fitting, placements, strict=True)
        }
        self.item = replace(
            item,
            known=[replace(c, step_ns=measured_ns.get(id(c), INFEASIBLE_NS)) for c in known],
            reference_ns=reference_ns,
        )

    @classmethod
    def of(
        cls,
        step: Workload,
        cluster: Cluster,
        report: Callable[[str], None] = lambda _: None,
        ray_address: str | None = None,
        together: int = 1,
    ) -> MeasuredDecoders:
        """Extract a step, measure its ops, start its devices; ``report`` each stage.

        Speeds of the devices are calibrated if ``cluster`` has no links. With an address, "" for
        the default one, nodes of a Ray cluster run the placements, so many ``together``.
        """
        check_devices(cluster.names)
        if len(cluster) < 2:
            raise ValueError("on one device there is nothing to learn: name two or more")
        check_has_memory(step)
        with ExitStack() as stack:
            if ray_address is not None:
                report("connecting to the Ray cluster")
                ray_cluster = stack.enter_context(RayCluster(ray_address))
                nodes = stack.enter_context(MeasuringNodes(ray_cluster, cluster))
            report("extracting the graph")
            extraction = extraction_for(step, cluster.names)
            runtime = runtime_for(extraction, cluster)
            if not runtime.places:
                raise ExtractionError(extraction.core_refusal)
            report("measuring op costs")
            cluster = cluster if cluster.links else calibrated(cluster)
            graph = costed(runtime, runtime.graph, cluster)
            problem = Problem.of(GraphArrays.from_graph(graph), runtime.planned(cluster))
            load_compiled_code()
            item = exercise(problem, "measured")
            predicted_s = (item.reference_ns / 1e9, item.reference_ns / 1e8)
            devices: Measuring
            if ray_address is None:
                devices = OnThisMachine(runtime.backend(problem, predicted_s))
                stack.callback(devices.close)
            else:
                groups = math.ceil(together / GROUP_SIZE_ON_NODES)
                nodes.load(NodeStep.of(step, problem, cluster), groups, report)
                devices = OnNodes(ray_cluster, nodes, Runs(predicted_s))
            report("measuring the heuristics")
            decoders = cls(item, runtime, devices)
            stack.pop_all()  # the decoders close what was opened
        return decoders

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """Return costs (B,) of decoded ``weights`` (B, K); there is only one problem."""
        del numbers
        devices, priority, simulated = self.evaluator.decode(weights)
        keys: list[bytes] = []
        new: dict[bytes, Placement] = {}
        for device_row, priority_row, cost in zip(devices, priority, simulated, strict=True):
            key, placement = self._placement(device_row, priority_row)
            keys.append(key)
            if cost >= OVERFULL_NS:
                self._ratios[key] = CANNOT_RUN
            elif key not in self._ratios:
                new[key] = placement
        self._measure(new)
        ratios = np.array([self._ratios[key] for key in keys])
        return np.asarray(np.rint(self.item.reference_ns * ratios), np.int64)

    def close(self) -> None:
        """Stop the workers."""
        self._devices.close()

    def _run(self, groups: Sequence[Sequence[Placement]]) -> list[list[Measurement]]:
        """Measure groups; what ran in no finite time has failed."""
        return [
            [run if _is_timed(run) else replace(run, failure=NO_TIME) for run in runs]
            for runs in self._devices.measure(groups)
        ]

    def _heuristics(self, placements: Sequence[Placement]) -> list[Measurement]:
        """Measure placements in the same rounds, without those that cannot be run."""
        [runs] = self._run([placements])
        if all(run.ok for run in runs):
            return runs
        # One of them may have taken the devices down with it: try each by itself.
        alone = [run for [run] in self._run([[placement] for placement in placements])]
        fine = [k for k, run in enumerate(alone) if run.ok]
        if fine:
            [together] = self._run([[placements[k] for k in fine]])
            for k, run in zip(fine, together, strict=True):
                alone[k] = run
        return alone

    def _measure(self, new: Mapping[bytes, Placement]) -> None:
        keys, most = list(new), self._devices.group_size
        groups = [keys[first : first + most] for first in range(0, len(keys), most)]
        why = self._beside_reference(groups, new)
        for group in (group for group, reason in zip(groups, why, strict=True) if reason):
            # One of them may have taken the devices down with it: try each by itself.
            reasons = self._beside_reference([[key] for key in group], new)
            if all(reasons) and not self._run([[self._reference]])[0][0].ok:
                raise WorkerError(f"the best heuristic cannot be run: {reasons[-1]}")

    def _beside_reference(
        self, groups: Sequence[Sequence[bytes]], new: Mapping[bytes, Placement]
    ) -> list[str]:
        """Measure groups with the reference; return why it failed in each, with the group."""
        placements = [[self._reference, *(new[key] for key in group)] for group in groups]
        reasons = []
        for group, (reference, *runs) in zip(groups, self._run(placements), strict=True):
            self._remember(group, runs, reference)
            reasons.append("" if reference.ok else reference.failure or "it was not measured")
        return reasons

    def _remember(
        self, keys: Sequence[bytes], runs: Sequence[Measurement], reference: Measurement
    ) -> None:
        """Store the ratios of placements to the reference that ran in the same rounds."""
        self.measured[reference.node] += len(runs)
        busy = contended([reference, *runs])
        for key, run in zip(keys, runs, strict=True):
            if not run.ok or not reference.ok:
                ratio = CANNOT_RUN
            elif run is reference or tied(run, reference, contended=busy):
                ratio = 1.0
            else:
                ratio = run.step_s(contended=busy) / reference.step_s(contended=busy)
            believable = math.isfinite(ratio) and 0.0 < ratio < CANNOT_RUN
            self._ratios[key] = ratio if believable else CANNOT_RUN

    def _placement(
        self, devices: NDArray[np.int32], priority: NDArray[np.float64]
    ) -> tuple[bytes, Placement]:
        """Return a placement whose priorities give the simulated order, and a key for both."""
        problem = self._problem
        order = self._runtime.order(problem, self._simulator.run(devices, priority))
        ranks = np.empty(problem.op_count)
        ranks[order] = np.arange(problem.op_count, 0, -1)
        made_by = MadeBy(placer="policy", version=VERSION)
        placement = Placement.of(problem.graph, problem.cluster, devices, ranks, made_by)
        return devices.tobytes() + ranks.tobytes(), placement


def _is_timed(run: Measurement) -> bool:
    """Return whether all times of a run are finite; also if it failed and has none."""
    return bool(np.isfinite(run.wall_s).all() and np.isfinite(run.cpu_clock_s).all())
