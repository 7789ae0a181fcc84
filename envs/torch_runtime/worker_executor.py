"""Placements run on torch devices by a process per device, to measure them.

A turn starts processes of its own, since the weights of several placements may not fit beside each
other; the last ones stay until another placement has its turn. The unplaced model runs in this
process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from envs.executors.cores.errors import WorkerError
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.device_workers.pool import DeviceMemoryError
from envs.executors.device_workers.worker import Peaks
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import torch_device
from envs.measured import Failure, TimedStep
from envs.placement import Placement
from envs.problem import Problem
from envs.torch_runtime.executor import PlacementTurns, TorchExecutor, steady_step_s
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph


class WorkerExecutor:
    """Runs placed steps on ``cuda:*`` and ``cpu``, each driven by a process of its own.

    Processes have copies of the parameters, which a training step updates with learning rate 0.
    Memory of CUDA devices is limited to ``limits``, that of the host cannot be: a placement that
    exceeds it according to the simulator fails without being run.
    """

    def __init__(
        self,
        extraction: Extraction,
        calls: CallGraph,
        problem: Problem,
        *,
        limits: Mapping[str, int],
        timeout_s: float = 600.0,
    ) -> None:
        self.problem = problem
        self.joined: Cluster | None = None  # each device is driven for itself
        self._extraction = extraction
        self._calls = calls
        self._devices = [torch_device(name) for name in problem.cluster.names]
        self._limits = {torch_device(name): size for name, size in limits.items()}
        self._timeout_s = timeout_s
        self._in_process = TorchExecutor(
            extraction, calls, problem, limits=limits, timeout_s=timeout_s
        )
        self._placed: PlacedStep | None = None
        self._there: Placement | None = None  # the placement of these processes

    def load(self, placement: Placement) -> PlacementTurns | Failure:
        """Return the step as placed, unless it exceeds the memory of the host."""
        excess = self._in_process.host_excess(placement)
        return (
            Failure(reason=excess, overfull=True) if excess else PlacementTurns(self.run, placement)
        )

    def run(self, placement: Placement) -> TimedStep | Failure:
        """Run a few steps as placed, by other processes than before if need be."""
        if placement.leaves_unplaced:
            self._end()
            try:
                return self._in_process.run(placement)
            finally:
                self._in_process.clear()
        try:
            placed = self._placed_step(placement)
            wall_s = steady_step_s(self._step_s(placed), lambda: self._step_s(placed))
            tensors, reserved = self._named(placed.peaks())
            return TimedStep(
                wall_s=wall_s, peak_memory_bytes=tensors, reserved_memory_bytes=reserved
            )
        except (WorkerError, ValueError, OSError) as error:
            self._end()
            peaks = error.peaks if isinstance(error, DeviceMemoryError) else {}
            tensors, reserved = self._named(peaks)
            return Failure(
                reason=str(error),
                overfull=isinstance(error, DeviceMemoryError),
                peak_memory_bytes=tensors,
                reserved_memory_bytes=reserved,
            )

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._in_process.close()

    def _placed_step(self, placement: Placement) -> PlacedStep:
        if self._placed is None or self._there is not placement:
            self._end()
            self._placed = placed_step(
                self._extraction,
                self._calls,
                [self._devices[d] for d in placement.devices],
                placement.priority,
                limits=self._limits,
                timeout_s=self._timeout_s,
            )
            self._there = placement
            if self._extraction.step.optimizer is not None:
                self._placed.learning_rate = 0.0
        return self._placed

    def _step_s(self, placed: PlacedStep) -> float:
        step = self._extraction.step
        start_s = time.perf_counter()
        placed.step(*step.step_inputs, **step.keywords)
        return time.perf_counter() - start_s

    def _named(self, peaks: Mapping[torch.device, Peaks]) -> tuple[dict[str, int], dict[str, int]]:
        """Return peaks of tensors and of what is reserved, by the names of devices."""
        names = dict(zip(self._devices, self.problem.cluster.names, strict=True))
        return (
            {names[device]: peak.tensors for device, peak in peaks.items()},
            {names[device]: peak.reserved for device, peak in peaks.items()},
        )

    def _end(self) -> None:
        if self._placed is not None:
            self._placed.discard()  # the model has its values already
        self._placed = self._there = None


def placed_step(
    extraction: Extraction,
    calls: CallGraph,
    devices: Sequence[torch.device],
    priority: Sequence[float],
    *,
    limits: Mapping[torch.device, int] | None = None,
    timeout_s: float = 600.0,
) -> PlacedStep:
    """Return a step, with devices and priorities of the M nodes of ``calls``."""
    return PlacedStep(
        extraction,
        calls.devices_of_calls(devices),
        calls.launch_order(priority),
        limits=limits,
        step_timeout_s=timeout_s,
    )
