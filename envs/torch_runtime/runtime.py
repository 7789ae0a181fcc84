"""The runtime of torch devices: this process runs exported calls, or the model's own modules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import networkx as nx
import numpy as np

from envs.backend import ProgressCallback
from envs.costs.cached_costs import StepCosts, first_of_kinds
from envs.costs.calls import call_costs
from envs.costs.factors import Factors
from envs.costs.modules import torch_module_costs
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.discover import present
from envs.hardware.host import Host, is_synchronous
from envs.hardware.torch_devices import torch_device
from envs.measured import Executor, Measured
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator.schedule import Schedule, issue_order, run_order
from envs.torch_runtime.executor import TorchExecutor, placed_module
from envs.torch_runtime.worker_executor import WorkerExecutor, placed_step
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph, gradient_makers, placeable
from graphs.graph import GraphArrays

DEFAULT_ROUNDS: Final = 7
FRAGMENTED_SHARE: Final = 0.08
"""Share of a device's memory lost in gaps between tensors; a guess, 5 to 15 % are usual.

Runs that fit do not show it: what was freed stays reserved as long as there is room. Where runs do
not fit, the placement is searched again with the memory that gaps left in these.
"""
LIBRARY_BYTES: Final = 96 << 20
"""Scratch memory of cuBLAS (32 MiB on recent GPUs, for each of two streams) and cuDNN.

torch's allocator gives it. Other memory of the libraries is in use before free memory is queried.
"""


class TorchRuntime:
    """The runtime of ``cuda:*`` and ``cpu``: every call can be placed, its backward runs with it.

    Of a module graph, every module can be placed.
    """

    places: bool = True

    def __init__(self, extraction: Extraction, cluster: Cluster, *, overlap: bool = False) -> None:
        self.extraction = extraction
        self.calls = placeable(extraction)
        self.call_graph = self.calls if isinstance(self.calls, CallGraph) else None
        self.overlap = overlap
        if overlap and self.call_graph is None:
            raise ValueError(
                "a placed graph of modules runs the model's own code, which waits for each tensor "
                "that its hooks send: leave overlap out, it is for models that can be exported"
            )
        self.has_workers = one_process_each(cluster)
        if self.has_workers:
            _check_workers(extraction, self.call_graph)
        self.graph = self.calls.graph
        self.limits: Mapping[str, int] = {
            device.name: device.memory_bytes for device in cluster.devices
        }

    def costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> StepCosts:
        """Return the costs of calls alone, or of modules in context, which are never cached.

        Nothing is handed over: the step runs in this process.
        """
        cluster = _without_issued_launches(self._with_threads(cluster))
        if self.call_graph is None:
            return StepCosts(ops=torch_module_costs(self.extraction, cluster, progress=progress))
        costs = call_costs(self.extraction, self.call_graph, progress)
        return StepCosts(ops=costs.costs(first_of_kinds(cluster.devices), fresh=fresh))

    def known_costs(self, cluster: Cluster, *, unplaced: bool = False) -> StepCosts | None:
        """Return the cached costs of the calls, None unless all are cached."""
        if self.call_graph is None:
            return None
        costs = call_costs(self.extraction, self.call_graph, unplaced=unplaced)
        issued = _without_issued_launches(self._with_threads(cluster))
        ops = costs.known(first_of_kinds(issued.devices))
        return None if ops is None else StepCosts(ops=ops)

    def keep_factors(self, cluster: Cluster, factors: Factors, *, unplaced: bool = False) -> None:
        """Keep factors of the costs of calls, or of the unplaced model that makes them."""
        if self.call_graph is not None:
            costs = call_costs(self.extraction, self.call_graph, unplaced=unplaced)
            costs.keep_factors(first_of_kinds(cluster.devices), factors)

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with some memory reserved for fragmentation and libraries.

        Its hosts are the threads that issue ops: that of this process for all devices, or of a
        process for each. They overlap copies if this runtime does, and autograd issues their
        backward pass; processes of their own for the devices always overlap them. Copies that
        overlap are as fast as with page-locked memory, where that is known. The context of a CUDA
        device and its libraries are not reserved: they are there when free memory is queried.
        """
        devices = tuple(
            replace(device, memory_bytes=_without_reserve_bytes(device))
            for device in cluster.devices
        )
        overlap = self.overlap or self.has_workers
        hosts = tuple(
            replace(host, overlap=overlap, autograd=True)
            for host in self._with_threads(cluster).hosts
        )
        links = tuple(map(_with_pinned_speed, cluster.links)) if overlap else cluster.links
        return replace(cluster, devices=devices, links=links, hosts=hosts)

    def _with_threads(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the hosts that run it, whatever hosts its file has."""
        if self.has_workers or {*cluster.names} == {"cpu"}:
            return cluster
        return replace(cluster, hosts=(Host(devices=cluster.names),))

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the calls that compute the gradients of each call's parameters."""
        return gradient_makers(self.extraction, self.call_graph)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time, those on the CPU by end time."""
        return launch_order(problem, schedule)

    def peak_memory_bytes(self, placement: Placement, order: Sequence[int]) -> None:
        """Return None: devices report the memory of tensors, which the simulator predicts."""

    def backend(
        self,
        problem: Problem,
        predicted_s: Sequence[float] = (),
        *,
        rounds: int | None = None,
        seconds: float = math.inf,
    ) -> Measured:
        """Return a backend that runs a placed or hooked module in this process, or workers."""
        timeout_s = 600.0 + 300.0 * max(predicted_s, default=0.0)
        executor: Executor
        if self.has_workers and self.call_graph is not None:
            executor = WorkerExecutor(
                self.extraction, self.call_graph, problem, limits=self.limits, timeout_s=timeout_s
            )
        else:
            executor = TorchExecutor(
                self.extraction,
                self.calls,
                problem,
                limits=self.limits,
                timeout_s=timeout_s,
                overlap=self.overlap,
            )
        return Measured(executor, rounds=rounds or DEFAULT_ROUNDS, seconds=seconds)

    def final_rounds(self, step_s: Sequence[float]) -> int:
        """Return 0: weights move at each change of candidates, and steps vary little."""
        return 0

    def joined(self, cluster: Cluster) -> None:
        """Return None: each device is driven for itself."""

    def unplaced_problems(
        self, problem: Problem, graph: nx.DiGraph[str], progress: ProgressCallback | None = None
    ) -> list[Problem]:
        """Return the problem itself, with the factors of the unplaced model that are kept."""
        costs = self.known_costs(problem.cluster, unplaced=True)
        if costs is None:
            return [problem]
        return [Problem.of(GraphArrays.from_graph(costs.added_to(graph)), problem.cluster)]

    def apply(
        self, placement: Placement
    ) -> PlacedModule | PlacedStep | HookedModule | UnplacedModel:
        """Return the placed module, one whose own code runs between hooks, or the model itself.

        Where each device has a process of its own, return the placed step.
        """
        cluster = present(placement.device_names)
        fitting = placement.aligned(GraphArrays.from_graph(self.graph), cluster)
        devices = [torch_device(cluster.names[d]) for d in fitting.devices]
        if placement.leaves_unplaced:
            return UnplacedModel(self.extraction, device=devices[0])
        if self.has_workers and self.call_graph is not None:
            return placed_step(self.extraction, self.call_graph, devices, fitting.priority)
        return placed_module(
            self.extraction, self.calls, devices, fitting.priority, overlap=self.overlap
        )


def one_process_each(cluster: Cluster) -> bool:
    """Return whether a cluster with GPUs has a host, that is a thread, for each of its devices."""
    alone = {name for host in cluster.hosts if len(host.devices) == 1 for name in host.devices}
    has_gpu = any(name.startswith("cuda") for name in cluster.names)
    return has_gpu and len(cluster) > 1 and alone == {*cluster.names}


def _with_pinned_speed(link: Link) -> Link:
    bytes_per_s = link.pinned_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s
    return replace(link, bandwidth_bytes_per_s=bytes_per_s, pinned_bandwidth_bytes_per_s=0.0)


def _check_workers(extraction: Extraction, calls: CallGraph | None) -> None:
    """Raise ValueError for a step that processes of their own for the devices cannot run."""
    advice = "let one [[host]] of the cluster name all devices"
    if calls is None:
        raise ValueError(
            f"a graph of modules runs in one process, not in one for each device: {advice}"
        )
    if extraction.step.training and extraction.step.optimizer is None:
        raise ValueError(
            "each device has a process of its own, which keeps its parameters and must update "
            f"them: give the step an optimizer, or {advice}"
        )


def _without_issued_launches(cluster: Cluster) -> Cluster:
    """Return the cluster without the launches that occupy the thread of a host.

    Times of calls on them are those of their kernels, and their launches have times of their own.
    Where only the longer of both was measured, it occupies the device: the launch of the next call
    is made meanwhile.
    """
    issued = {name for host in cluster.hosts for name in host.devices}
    devices = tuple(
        replace(device, launch_s=0.0)
        if device.name in issued and not is_synchronous(device.name, device.kind)
        else device
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def _without_reserve_bytes(device: Device) -> int:
    libraries = LIBRARY_BYTES if device.name.startswith("cuda") else 0
    return max(int(device.memory_bytes * (1 - FRAGMENTED_SHARE)) - libraries, 0)


def launch_order(problem: Problem, schedule: Schedule) -> list[int]:
    """Return all ops in the order in which one process should launch them.

    Ops are ordered by simulated start, ops on the CPU by simulated end: an op on the CPU blocks
    launches until it is done, so whatever accelerators do meanwhile must be launched before it.
    With hosts the simulator has issued them in an order of its own.
    """
    if schedule.issued is not None:
        return issue_order(problem, schedule)
    on_cpu = np.array([name == "cpu" for name in problem.cluster.names])
    launch_ns = np.where(on_cpu[schedule.devices], schedule.end_ns, schedule.start_ns)
    return run_order(problem, launch_ns, schedule.end_ns)
