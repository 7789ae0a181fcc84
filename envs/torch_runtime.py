"""The runtime of torch devices: this process runs exported calls, or the model's own modules.

:class:`TorchExecutor` runs placements to measure them. A run moves the weights to the devices of a
placement, runs one uncounted step and then a few counted ones; their median is its time. Only wall
time is known. The clock runs between two points at which all devices are idle: a CUDA event covers
one stream of one device, but a step may begin on one device, end on another and use the host in
between.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch.utils._pytree import tree_map

from envs.backend import ProgressCallback
from envs.costs.cached_costs import StepCosts, first_of_kinds
from envs.costs.calls import call_costs
from envs.costs.modules import torch_module_costs
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.state_devices import put_back
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.torch.watchdog import ended_after
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import present
from envs.hardware.host import is_synchronous
from envs.hardware.torch_devices import CPU, is_out_of_memory, torch_device
from envs.measured import Failure, Measured, TimedStep, simulated_peaks
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.reasons import overfull_reason
from envs.simulator.schedule import Schedule, issue_order, run_order
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph, ModuleMap, gradient_makers, placeable
from graphs.graph import GraphArrays
from graphs.workload import step_copy

DEFAULT_ROUNDS: Final = 7
TURN_S: Final = 0.2
MOST_STEPS: Final = 10
"""Maximum number of counted steps per run: as many as take about ``TURN_S``, at least one."""
UNLIMITED: Final = np.iinfo(np.int64).max
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
        if overlap and self.call_graph is None:
            raise ValueError(
                "a placed graph of modules runs the model's own code, which waits for each tensor "
                "that its hooks send: leave overlap out, it is for models that can be exported"
            )
        self.graph = self.calls.graph
        self.limits = {device.name: device.memory_bytes for device in cluster.devices}

    def costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> StepCosts:
        """Return the costs of calls alone, or of modules in context, which are never cached.

        Nothing is handed over: the step runs in this process.
        """
        cluster = _without_issued_launches(cluster)
        if self.call_graph is None:
            return StepCosts(ops=torch_module_costs(self.extraction, cluster, progress=progress))
        costs = call_costs(self.extraction, self.call_graph, progress)
        return StepCosts(ops=costs.costs(first_of_kinds(cluster.devices), fresh=fresh))

    def known_costs(self, cluster: Cluster) -> StepCosts | None:
        """Return the cached costs of the calls, None unless all are cached."""
        if self.call_graph is None:
            return None
        costs = call_costs(self.extraction, self.call_graph)
        ops = costs.known(first_of_kinds(_without_issued_launches(cluster).devices))
        return None if ops is None else StepCosts(ops=ops)

    def keep_factors(self, cluster: Cluster, factors: Mapping[str, Mapping[str, float]]) -> None:
        """Keep factors of the costs of calls."""
        if self.call_graph is not None:
            costs = call_costs(self.extraction, self.call_graph)
            costs.keep_factors(first_of_kinds(cluster.devices), factors)

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster with some memory reserved for fragmentation and libraries.

        Its hosts overlap copies if this runtime does. The context of a CUDA device is not reserved:
        it is already allocated when free memory is queried.
        """
        devices = tuple(
            replace(device, memory_bytes=_without_reserve_bytes(device))
            for device in cluster.devices
        )
        hosts = tuple(replace(host, overlap=self.overlap) for host in cluster.hosts)
        return replace(cluster, devices=devices, hosts=hosts)

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the calls that compute the gradients of each call's parameters."""
        return gradient_makers(self.extraction, self.call_graph)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time, those on the CPU by end time."""
        return launch_order(problem, schedule)

    def peak_memory_bytes(self, placement: Placement, order: Sequence[int]) -> None:
        """Return None: devices report the memory of tensors, which the simulator predicts."""

    def backend(
        self, problem: Problem, predicted_s: Sequence[float] = (), *, rounds: int | None = None
    ) -> Measured:
        """Return a backend that runs a placed or hooked module in this process."""
        executor = TorchExecutor(
            self.extraction,
            self.calls,
            problem,
            limits=self.limits,
            timeout_s=600.0 + 300.0 * max(predicted_s, default=0.0),
            overlap=self.overlap,
        )
        return Measured(executor, rounds=rounds or DEFAULT_ROUNDS)

    def unplaced(self, cluster: Cluster) -> None:
        """Return None: the unplaced model is the placement on one device."""

    def apply(self, placement: Placement) -> PlacedModule | HookedModule:
        """Return the placed module, or one whose own code runs between hooks."""
        cluster = present(placement.device_names)
        fitting = placement.aligned(GraphArrays.from_graph(self.graph), cluster)
        devices = [torch_device(cluster.names[d]) for d in fitting.devices]
        return placed_module(
            self.extraction, self.calls, devices, fitting.priority, overlap=self.overlap
        )


def _without_issued_launches(cluster: Cluster) -> Cluster:
    """Return the cluster without the launches that occupy the thread of a host.

    Times of calls in a row are the longer of launch and work, so a device of a host is occupied for
    the whole of it: the launch of the next call is made meanwhile.
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


class TorchExecutor:
    """Runs placed steps on ``cuda:*`` and ``cpu`` in this process.

    It works on a copy of the model and keeps all values on the host as well: a new placement copies
    its weights from there to the accelerators, unless they are still there from its last run, and
    never has to copy the previous ones back. A training step consists of forward, backward and the
    optimizer updates, if there is an optimizer, with learning rate 0; gradients are cleared before
    it. Memory of CUDA devices is limited to ``limits`` while it is open. Host memory cannot be
    limited, since this process holds more than the step: a placement that exceeds it according to
    the simulator fails without being run.

    Args:
        extraction: the step.
        calls: its graph of calls, or of modules.
        problem: that graph with costs, and the devices.
        limits: {device name: bytes} that a step may use; on CUDA devices fragmentation included.
        timeout_s: a run that takes longer counts as hung. A hung op can only be ended with this
            process, which then exits with a message.
        overlap: run exported calls with copies that overlap with compute.
    """

    def __init__(
        self,
        extraction: Extraction,
        calls: CallGraph | ModuleMap,
        problem: Problem,
        *,
        limits: Mapping[str, int] | None = None,
        timeout_s: float = 600.0,
        overlap: bool = False,
    ) -> None:
        self.calls = calls
        self.problem = problem
        self.timeout_s = timeout_s
        self.overlap = overlap
        self._devices = [torch_device(name) for name in problem.cluster.names]
        self.unplaced: Cluster | None = None  # it is the placement on one device
        self._simulator = Simulator(problem)
        step = step_copy(extraction.step)
        self._extraction = replace(extraction, step=step)
        self._on_host = {name: t.detach().to(CPU) for name, t in step.named_state().items()}
        put_back(step, self._on_host)
        self._module: PlacedModule | HookedModule | None = None
        self._there: Placement | None = None  # the placement whose weights are in place
        self._open = ExitStack()
        limited = {torch_device(name): size for name, size in (limits or {}).items()}
        self._host_limit_bytes = np.array(
            [
                limited.get(device, UNLIMITED) if device.type != "cuda" else UNLIMITED
                for device in self._devices
            ]
        )
        self._held_bytes = [torch_devices.held_bytes(device) for device in self._devices]
        self._open.enter_context(torch_devices.limited(limited))
        self._open.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))

    def load(self, placement: Placement) -> _PlacedStep | Failure:
        """Return the step as placed, unless it exceeds the memory of the host."""
        excess = self._host_excess(placement)
        return Failure(reason=excess, overfull=True) if excess else _PlacedStep(self, placement)

    def close(self) -> None:
        """Drop the copy of the model and lift the memory limits."""
        self._drop()
        self._open.close()

    def run(self, placement: Placement) -> TimedStep | Failure:
        """Run a few steps as placed."""
        hung = (
            f"a step on {', '.join(self.problem.cluster.names)} was not over after "
            f"{self.timeout_s:g} s: an op hangs, or a device does not answer. This process ends, "
            "since nothing else ends such an op"
        )
        try:
            with ended_after(self.timeout_s, hung):
                wall_s = self._steps(placement)
            return TimedStep(wall_s=wall_s, peak_memory_bytes=self._peaks())
        except Exception as error:  # noqa: BLE001  # whatever the model's own code raises
            overfull = is_out_of_memory(error)
            failure = _in_a_line(error)
        peaks = self._peaks() if overfull else {}
        self._drop()  # here the error and its frames, which hold tensors, are gone
        if not overfull:
            return Failure(reason=f"torch cannot run it: {failure}")
        predicted = ", ".join(
            f"{size / 1e9:.2f} GB on {name}"
            for name, size in simulated_peaks(self._simulator, placement).items()
        )
        return Failure(
            reason=f"{failure} (predicted: {predicted})", overfull=True, peak_memory_bytes=peaks
        )

    def _host_excess(self, placement: Placement) -> str:
        """Return why devices whose allocators enforce no limit (all but CUDA) have no room."""
        if (self._host_limit_bytes == UNLIMITED).all():
            return ""
        try:
            schedule = self._simulator.run(*placement.arrays())
        except ValueError:  # a step longer than the simulator counts
            return ""
        return overfull_reason(
            self.problem, schedule.devices, schedule.peak_bytes, room_bytes=self._host_limit_bytes
        )

    def _steps(self, placement: Placement) -> float:
        if self._there is not placement:
            self._clear()
        for device in self._devices:
            torch_devices.reset_peak(device)
        module = self._placed(placement)
        first_s = self._step(module)
        count = min(max(round(TURN_S / first_s), 1), MOST_STEPS)
        return float(np.median([self._step(module) for _ in range(count)]))

    def _step(self, module: PlacedModule | HookedModule) -> float:
        step = self._extraction.step
        # copied, since a model may modify the containers that it gets
        inputs, keywords = tree_map(lambda leaf: leaf, (step.step_inputs, dict(step.keywords)))
        self._wait()
        start = time.perf_counter()
        module.zero_grad(set_to_none=True)
        module.step(*inputs, **keywords)
        self._wait()
        return time.perf_counter() - start

    def _placed(self, placement: Placement) -> PlacedModule | HookedModule:
        if self._module is not None and self._there is placement:
            return self._module
        devices = [self._devices[d] for d in placement.devices]
        if self._module is None:
            self._module = placed_module(
                self._extraction, self.calls, devices, placement.priority, overlap=self.overlap
            )
            updates = self._extraction.step.optimizer is not None
            if updates and isinstance(self._module, PlacedModule):
                self._module.learning_rate = 0.0
        else:
            where = self.calls.devices_of_calls(devices)
            self._module.place(where, self.calls.launch_order(placement.priority))
        self._there = placement
        return self._module

    def _drop(self) -> None:
        """Drop the placed module, which an error may have left incomplete."""
        self._clear()
        if isinstance(self._module, HookedModule):
            self._module.close()
        self._module = None
        gc.collect()  # some tensors are in reference cycles
        for device in self._devices:
            torch_devices.release(device)

    def _clear(self) -> None:
        """Empty the accelerators, which may have no room for the old and the new weights."""
        self._there = None
        if isinstance(self._module, PlacedModule):
            self._module.load_optimizer_state({})
        put_back(self._extraction.step, self._on_host)
        for device in self._devices:
            torch_devices.release(device)

    def _wait(self) -> None:
        for device in self._devices:
            torch_devices.synchronize(device)

    def _peaks(self) -> dict[str, int]:
        """Return the peak memory of the step, without what was allocated before, by device."""
        peaks = map(torch_devices.peak_bytes, self._devices)
        names = self.problem.cluster.names
        return {
            name: max(peak - held, 0)
            for name, peak, held in zip(names, peaks, self._held_bytes, strict=True)
            if peak is not None
        }


class _PlacedStep:
    """One placement on the devices of an executor."""

    def __init__(self, executor: TorchExecutor, placement: Placement) -> None:
        self._executor = executor
        self._placement = placement

    def run(self) -> TimedStep | Failure:
        return self._executor.run(self._placement)

    def close(self) -> None:
        """Do nothing: the weights stay for the next evaluation."""


def placed_module(
    extraction: Extraction,
    calls: CallGraph | ModuleMap,
    devices: Sequence[torch.device],
    priority: Sequence[float],
    *,
    overlap: bool = False,
) -> PlacedModule | HookedModule:
    """Return the module of a step, with devices and priorities of the M nodes of ``calls``."""
    where = calls.devices_of_calls(devices)
    if isinstance(calls, ModuleMap):
        return HookedModule(extraction, where)
    return PlacedModule(extraction, where, calls.launch_order(priority), overlap=overlap)


def _in_a_line(error: BaseException) -> str:
    name, message = type(error).__name__, str(error).partition("\n")[0]
    if isinstance(error, RuntimeError | ValueError) and message:
        return message
    return f"{name}: {message}" if message else name


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
    return run_order(problem, launch_ns)
