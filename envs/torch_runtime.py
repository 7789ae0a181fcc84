"""The runtime of torch devices: this process runs exported calls, or the model's own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from envs.backend import Evaluation, ProgressCallback, measurements
from envs.costs.cached_costs import OpCosts
from envs.costs.calls import call_costs, known_call_costs
from envs.costs.modules import torch_module_costs
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import present
from envs.hardware.torch_devices import torch_device
from envs.measured.torch_backend import (
    DEFAULT_ROUNDS,
    MeasuredModule,
    check_overlap,
    launch_order,
    placed_module,
)
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator.schedule import Schedule
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph, gradient_makers, placeable
from graphs.graph import GraphArrays

FRAGMENTED_SHARE: Final = 0.08
"""Share of a device's memory lost in gaps between tensors; a guess, 5 to 15 % are usual."""
LIBRARY_BYTES: Final = 96 << 20
"""Scratch memory of cuBLAS (32 MiB on recent GPUs, for each of two streams) and cuDNN."""


class TorchRuntime:
    """The runtime of ``cuda:*`` and ``cpu``: every call can be placed, its backward runs with it.

    Of a module graph, every module can be placed.
    """

    runs: bool = True

    def __init__(self, extraction: Extraction, cluster: Cluster, *, overlap: bool = False) -> None:
        self.extraction = extraction
        self.calls = placeable(extraction)
        self.call_graph = self.calls if isinstance(self.calls, CallGraph) else None
        self.overlap = overlap
        if overlap:
            check_overlap(self.calls)
        self.graph = self.calls.graph
        self.limits = {device.name: device.memory_bytes for device in cluster.devices}

    def costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> dict[str, OpCosts]:
        """Return the costs of calls alone, or of modules in context, which are never cached."""
        if self.call_graph is None:
            return torch_module_costs(self.extraction, cluster, progress=progress)
        return call_costs(self.extraction, self.call_graph, cluster, fresh=fresh, progress=progress)

    def known_costs(self, cluster: Cluster) -> dict[str, OpCosts] | None:
        """Return the cached costs of the calls, None unless all are cached."""
        if self.call_graph is None:
            return None
        return known_call_costs(self.extraction, self.call_graph, cluster)

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with some memory reserved for fragmentation and libraries.

        The context of a CUDA device is not reserved: it is already allocated when free memory is
        queried.
        """
        devices = tuple(
            replace(device, memory_bytes=_without_reserve_bytes(device))
            for device in cluster.devices
        )
        return replace(cluster, devices=devices)

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the calls that compute the gradients of each call's parameters."""
        return gradient_makers(self.extraction, self.call_graph)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time, those on the CPU by end time."""
        return launch_order(problem, schedule)

    def backend(
        self, problem: Problem, predicted_s: Sequence[float] = (), *, rounds: int | None = None
    ) -> MeasuredModule:
        """Return a backend that runs a placed or hooked module in this process."""
        return MeasuredModule(
            self.extraction,
            self.calls,
            problem,
            limits=self.limits,
            rounds=rounds or DEFAULT_ROUNDS,
            turn_timeout_s=600.0 + 300.0 * max(predicted_s, default=0.0),
            overlap=self.overlap,
        )

    def measure(
        self,
        problem: Problem,
        placements: Sequence[Placement],
        predicted_s: Sequence[float],
        progress: ProgressCallback | None = None,
    ) -> Evaluation:
        """Run placements in turn; the unplaced step is the placement on one device."""
        with closing(self.backend(problem, predicted_s)) as backend:
            results = backend.evaluate(placements, progress)
            return Evaluation(measurements=measurements(results), interrupted=backend.interrupted)

    def apply(self, placement: Placement) -> PlacedModule | HookedModule:
        """Return the placed module, or one whose own code runs between hooks."""
        cluster = present(placement.device_names)
        fitting = placement.aligned(GraphArrays.from_graph(self.graph), cluster)
        devices = [torch_device(cluster.names[d]) for d in fitting.devices]
        return placed_module(
            self.extraction, self.calls, devices, fitting.priority, overlap=self.overlap
        )


def _without_reserve_bytes(device: Device) -> int:
    libraries = LIBRARY_BYTES if device.name.startswith("cuda") else 0
    return max(int(device.memory_bytes * (1 - FRAGMENTED_SHARE)) - libraries, 0)
