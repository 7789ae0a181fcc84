"""Runtimes: what runs the ops on a cluster's devices, and what follows from it.

Pinned cores run the joint graph op by op in worker processes, torch devices the calls of the
exported forward pass in this process; both run the model's own code module by module in this
process. Only this module asks which of the two a cluster needs; importing it does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import networkx as nx

from envs.backend import Backend, ProgressCallback, StepResult
from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_core, is_here, is_local_core_set, present, split_name
from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import GraphArrays
from graphs.text import suggestion

if TYPE_CHECKING:
    import torch

    from envs.costs.cached_costs import StepCosts
    from envs.costs.calibrate import Calibration
    from envs.costs.factors import Factors
    from envs.executors.cores.placed_model import PlacedModel
    from envs.executors.device_workers.placed_step import PlacedStep
    from envs.executors.hooks.hooked_module import HookedModule
    from envs.executors.torch.placed_module import PlacedModule
    from envs.executors.unplaced import UnplacedModel
    from envs.measured import Measured
    from envs.simulator.schedule import Schedule
    from graphs.extract import Extraction, Workload


BACKENDS: Final = ("simulated", "measured")


class Runtime(Protocol):
    """Run an extracted step on one kind of devices: its ops, their costs, and backends."""

    extraction: Extraction
    graph: nx.DiGraph[str]  # whose nodes can be placed
    limits: Mapping[str, int]  # {device name: bytes} that a step may use when it is run
    places: bool  # whether placements of these nodes can be run, on any data

    def costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> StepCosts:
        """Return the costs of the nodes of the graph and of the hand-over, measured or cached.

        ``fresh`` ignores the cache but still stores the new measurements.
        """
        ...

    def known_costs(self, cluster: Cluster) -> StepCosts | None:
        """Return the cached costs, or None if any would have to be measured."""
        ...

    def keep_factors(self, cluster: Cluster, factors: Factors, *, unplaced: bool = False) -> None:
        """Keep factors with the cached costs.

        They were fitted to measured steps of the problem that these costs made: of placements, or
        of the ``unplaced`` model.
        """
        ...

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the memory that placements may use."""
        ...

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return {id with parameters: ids that compute their gradients} of the graph's nodes."""
        ...

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return all ops in execution order, from a simulated schedule."""
        ...

    def peak_memory_bytes(
        self, placement: Placement, order: Sequence[int]
    ) -> Mapping[str, int] | None:
        """Return the predicted peak memory, {device name: bytes}, of ops that run in this order.

        None where the simulator predicts it, which counts tensors only.
        """
        ...

    def backend(
        self,
        problem: Problem,
        predicted_s: Sequence[float] = (),
        *,
        rounds: int | None = None,
        seconds: float = math.inf,
    ) -> Measured:
        """Return a backend that runs placements; close it after use.

        Timeouts follow from the longest of the predicted step times, the number of rounds, unless
        given, from the first. Rounds are fewer where ``seconds`` are over, see
        :class:`envs.measured.Measured`.
        """
        ...

    def final_rounds(self, step_s: Sequence[float]) -> int:
        """Return in how many rounds the fastest of the candidates that ran shall run once more.

        ``step_s`` are their measured steps. 0 where the first rounds suffice.
        """
        ...

    def joined(self, cluster: Cluster) -> Cluster | None:
        """Return the cluster whose one device is all devices together, if there is one.

        A placement on it runs the model's own code with torch's threads on all cores.
        """
        ...

    def unplaced_problems(
        self, problem: Problem, graph: nx.DiGraph[str], progress: ProgressCallback | None = None
    ) -> list[Problem]:
        """Return the problems of the unplaced model, which runs on any one of their devices.

        ``graph`` is that of ``problem``, with costs. [] if all that could be unplaced is placed.
        """
        ...

    def apply(
        self, placement: Placement
    ) -> PlacedModel | PlacedModule | PlacedStep | HookedModule | UnplacedModel:
        """Return the model, ready to run as placed."""
        ...


def runtime_for(extraction: Extraction, cluster: Cluster, *, overlap: bool = False) -> Runtime:
    """Return the runtime for the devices of a cluster.

    Devices that are not on this machine are simulated op by op, like cores.
    """
    from envs.core_runtime import CoreRuntime
    from envs.torch_runtime import TorchRuntime

    if not _on_cores(cluster.names) and all(map(is_here, cluster.names)):
        return TorchRuntime(extraction, cluster, overlap=overlap)
    if overlap:
        raise ValueError(
            "pinned cores have no copies to overlap, since a worker takes what it reads itself: "
            "leave overlap out, it is for cuda:* and cpu"
        )
    return CoreRuntime(extraction, cluster)


def extraction_for(workload: Workload, names: Iterable[str], extractor: str = "auto") -> Extraction:
    """Extract a step for these devices.

    Devices of this machine run modules by the model's own code where a recording would hold for
    the example inputs only, torch devices also where the model can only be recorded.

    Raises:
        ExtractionError: no extractor can extract the step.
    """
    from graphs.extract import extract  # imports torch

    names = tuple(names)
    if not all(map(is_here, names)):
        return extract(workload, extractor)
    return extract(workload, extractor, needs="any data" if _on_cores(names) else "calls")


def start_ahead(cluster: Cluster) -> None:
    """Start the process that forks the workers of a cluster, if all of them are here.

    It imports torch while the model is loaded and extracted. If it cannot be started, the first
    worker says why.
    """
    if all(map(is_local_core_set, cluster.names)):
        from envs.executors.cores.fork_server import running_server

        with suppress(OSError):
            running_server()


def backend_named(
    name: str,
    problem: Problem,
    runtime: Runtime | None,
    *,
    rounds: int,
    until_closed: ExitStack,
) -> Backend:
    """Return the backend "simulated", or "measured", which ``until_closed`` closes."""
    if name not in BACKENDS:
        raise ValueError(
            f"there is no backend {name!r}, there are {', '.join(BACKENDS)}, and any object with a "
            f"method evaluate{suggestion(name, BACKENDS)}"
        )
    if name == "simulated":
        from envs.simulator import Simulated

        return Simulated(problem)
    if runtime is None:
        raise ValueError('backend "measured" runs a model: give a workload, not a graph')
    measured = runtime.backend(problem, rounds=rounds)
    until_closed.callback(measured.close)
    return measured


def simulated_result(runtime: Runtime | None, problem: Problem, placement: Placement) -> StepResult:
    """Return the simulator's result, with the memory that a runtime predicts."""
    from envs.simulator import Simulated

    [result] = Simulated(problem).evaluate([placement])
    peaks = worker_memory(runtime, problem, placement) if result.feasible else None
    return replace(result, peak_memory_bytes=peaks or result.peak_memory_bytes)


def worker_memory(
    runtime: Runtime | None, problem: Problem, placement: Placement
) -> Mapping[str, int] | None:
    """Return the memory that a runtime predicts; None where the simulator predicts it."""
    from envs.simulator import Simulator

    if runtime is None:
        return None
    schedule = Simulator(problem).run(*placement.arrays())
    return runtime.peak_memory_bytes(placement, runtime.order(problem, schedule))


def costed(
    runtime: Runtime,
    graph: nx.DiGraph[str],
    cluster: Cluster,
    *,
    fresh: bool = False,
    progress: ProgressCallback | None = None,
) -> nx.DiGraph[str]:
    """Return a copy of ``graph``, which has the nodes of the runtime's, with costs."""
    return runtime.costs(cluster, fresh=fresh, progress=progress).added_to(graph)


def costed_problem(runtime: Runtime, cluster: Cluster) -> Problem:
    """Return the problem of placing a step; devices and ops are measured where needed."""
    cluster = calibrated(cluster)
    graph = costed(runtime, runtime.graph, cluster)
    return Problem.of(GraphArrays.from_graph(graph), runtime.planned(cluster))


def known_problem(runtime: Runtime, cluster: Cluster) -> Problem | None:
    """Return the problem from the cache; None if anything would have to be measured."""
    if (before := calibrated_before(cluster)) is None:
        return None
    if (costs := runtime.known_costs(before)) is None:
        return None
    graph = costs.added_to(runtime.graph)
    return Problem.of(GraphArrays.from_graph(graph), runtime.planned(before))


def calibrated(cluster: Cluster, *, again: bool = False) -> Cluster:
    """Return the cluster with missing links and device speeds filled in by measurement.

    Values that the cluster gives stay as they are. Measurements are cached in a file, see
    :mod:`envs.costs.calibrate`, unless other processes used the cores. ``again`` forces a new one.
    """
    from envs.costs.calibrate import filled

    calibration = _calibration(cluster)
    known = None if again else calibration.known()
    return filled(cluster, calibration.measured() if known is None else known)


def calibrated_before(cluster: Cluster) -> Cluster | None:
    """Return the cluster filled in from the cache, or None if it would have to be measured."""
    from envs.costs.calibrate import filled

    known = _calibration(cluster).known()
    return None if known is None else filled(cluster, known)


def reduces_in_backward(cluster: Cluster) -> bool:
    """Return whether replicas on a cluster, also of several hosts, reduce during the backward pass.

    Workers of pinned cores deliver all gradients to their replica's process after it.
    """
    return not _on_cores(split_name(name)[1] for name in cluster.names)


def tensor_device(name: str) -> torch.device:
    """Return the torch device that holds tensors of a device; for pinned cores it is the CPU."""
    from envs.hardware.torch_devices import CPU, torch_device

    return CPU if is_core(name) else torch_device(name)


def has_runtime(name: str) -> bool:
    """Return whether devices of this name, here or elsewhere, can run ops."""
    return is_core(name) or is_of_torch(name)


def is_of_torch(name: str) -> bool:
    """Return whether torch has devices with this name, here or elsewhere, that can compute."""
    import torch

    try:
        return torch.device(name).type != "meta"
    except RuntimeError:
        return False


def _on_cores(names: Iterable[str]) -> bool:
    return any(is_core(name) for name in names)


def _calibration(cluster: Cluster) -> Calibration:
    from envs.costs.calibrate import core_calibration, torch_calibration

    make = core_calibration if _on_cores(cluster.names) else torch_calibration
    return make(present(cluster.names))
