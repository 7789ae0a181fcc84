"""Placements run on torch devices, to measure them.

A run moves the weights to the devices of a placement and runs uncounted steps until two in a row
agree, since the first ones allocate memory and load kernels. The time of a run is the median of the
last of these and of as many more as a turn takes. Only wall time is known. The clock runs between
two points at which all devices are idle: a CUDA event covers one stream of one device, but a step
may begin on one device, end on another and use the host in between.
"""

from __future__ import annotations

import cmath
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.state_devices import put_back
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.torch.watchdog import ended_after
from envs.executors.unplaced import UnplacedModel
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import (
    CPU,
    is_of_cuda,
    is_out_of_memory,
    torch_device,
)
from envs.measured import DevicesLostError, Failure, TimedStep, simulated_peaks
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.reasons import overfull_reason
from envs.torch_runtime.lost_devices import LostDevices
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph, ModuleMap
from graphs.text import first_line
from graphs.workload import step_copy

AGREEMENT: Final = 0.1
"""Relative difference up to which two steps in a row show that it is warm."""
MOST_WARM_UP: Final = 6
"""Maximum number of steps in which it gets warm; a machine may be too noisy for any to agree."""
TURN_S: Final = 0.2
MOST_STEPS: Final = 10
"""Maximum number of counted steps per run: as many as take about ``TURN_S``, at least one."""
UNLIMITED: Final = np.iinfo(np.int64).max
_Running: TypeAlias = "PlacedModule | HookedModule | UnplacedModel"


class TorchExecutor:
    """Runs placed steps on ``cuda:*`` and ``cpu`` in this process.

    It works on a copy of the model and keeps all values on the host as well: a new placement copies
    its weights from there to the accelerators, unless they are still there from its last run, and
    never has to copy the previous ones back. The unplaced model runs in the same way, its own code
    on one device. A training step consists of forward, backward and the optimizer updates, if there
    is an optimizer, with learning rate 0; gradients are cleared before it. Gradients that are not
    finite change parameters all the same: before the next step these are those of the model again,
    as is whatever else a step changes before the next placement. Memory of CUDA devices is limited
    to ``limits`` while it is open. Host memory cannot be limited, since this process holds more
    than the step: a placement that exceeds it according to the simulator fails without being run.
    After an error that CUDA does not recover from, such as a failed assertion on the device, only
    candidates without the GPUs that fail since then can be run: often on the CPU alone. GPUs that
    fail before are left out in the same way.

    Args:
        extraction: the step.
        calls: its graph of calls, or of modules.
        problem: that graph with costs, and the devices.
        limits: {device name: bytes} that a step may use; on CUDA devices fragmentation included.
        timeout_s: a run that takes longer counts as hung. A hung op can only be ended with this
            process, which then exits with a message.
        overlap: run exported calls with copies that overlap with compute.

    Raises:
        DevicesLostError: no device can be used, or the model cannot be copied.
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
        self.joined: Cluster | None = None  # each device is driven for itself
        self._simulator = Simulator(problem)
        try:
            step = step_copy(extraction.step)
        except Exception as error:  # of the model's own code
            raise DevicesLostError(f"the model cannot be copied: {first_line(error)}") from error
        self._extraction = replace(extraction, step=step)
        self._on_host = {name: t.detach().to(CPU) for name, t in step.named_state().items()}
        updates = step.optimizer is not None
        self._written = {
            name: tensor.detach()
            for name, tensor in extraction.step.named_state().items()
            if not isinstance(tensor, nn.Parameter) or (updates and tensor.requires_grad)
        }
        put_back(step, self._on_host)
        self._placed: PlacedModule | HookedModule | None = None  # of all placements
        self._running: _Running | None = None
        self._there: Placement | None = None  # the placement whose weights are in place
        self._lost = LostDevices(self._devices)
        limited = {torch_device(name): size for name, size in (limits or {}).items()}
        self._host_limit_bytes = np.array(
            [
                limited.get(device, UNLIMITED) if device.type != "cuda" else UNLIMITED
                for device in self._devices
            ]
        )
        self._open = self._lost.others_limited(limited)
        self._held_bytes = {d: torch_devices.held_bytes(d) for d in self._lost.usable}
        if not gc.get_freeze_count():  # what there was need not be searched at every placement
            gc.collect()
            gc.freeze()
            self._open.callback(gc.unfreeze)

    def load(self, placement: Placement) -> PlacementTurns | Failure:
        """Return the step as placed, unless it exceeds the memory of the host."""
        excess = self.host_excess(placement)
        return (
            Failure(reason=excess, overfull=True) if excess else PlacementTurns(self.run, placement)
        )

    def close(self) -> None:
        """Drop the copy of the model and lift the memory limits."""
        self._drop("")
        with suppress(RuntimeError) if self._lost else nullcontext():
            self._open.close()

    def clear(self) -> None:
        """Free what the last run left on the devices."""
        self._drop("")

    def run(self, placement: Placement) -> TimedStep | Failure:
        """Run a few steps as placed, unless an earlier run left a GPU of it unusable.

        A run waits for all GPUs: if one of them is lost meanwhile, it is made again.
        """
        while True:
            lost_before = len(self._lost)
            result = self._run(placement)
            if isinstance(result, TimedStep) or len(self._lost) == lost_before:
                return result

    def _run(self, placement: Placement) -> TimedStep | Failure:
        if reason := self._lost.reason(self._devices[d] for d in dict.fromkeys(placement.devices)):
            return Failure(reason=reason)
        hung = (
            f"a step on {', '.join(self.problem.cluster.names)} was not over after "
            f"{self.timeout_s:g} s: an op hangs, or a device does not answer. This process ends, "
            "since nothing else ends such an op"
        )
        try:
            with ended_after(self.timeout_s, hung):
                wall_s = self._steps(placement)
            return TimedStep(
                wall_s=wall_s,
                peak_memory_bytes=self._peaks(torch_devices.peak_bytes),
                reserved_memory_bytes=self._peaks(torch_devices.peak_reserved_bytes),
            )
        except Exception as error:  # noqa: BLE001  # whatever the model's own code raises
            overfull, by_cuda = is_out_of_memory(error), is_of_cuda(error)
            failure = _in_a_line(error)
        peaks = self._peaks(torch_devices.peak_bytes) if overfull else {}
        reserved = self._peaks(torch_devices.peak_reserved_bytes) if overfull else {}
        self._drop(failure)  # here the error and its frames, which hold tensors, are gone
        if not overfull:
            if by_cuda:
                self._lost.find(failure)
            return Failure(reason=f"torch cannot run it: {failure}")
        predicted = ", ".join(
            f"{size / 1e9:.2f} GB on {name}"
            for name, size in simulated_peaks(self._simulator, placement).items()
        )
        return Failure(
            reason=f"{failure} (predicted: {predicted})",
            overfull=True,
            peak_memory_bytes=peaks,
            reserved_memory_bytes=reserved,
        )

    def host_excess(self, placement: Placement) -> str:
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
        for device in self._lost.usable:
            torch_devices.reset_peak(device)
        module = self._module_of(placement)
        first_s = self._step(module)
        spoils = self._restore_spoilt()

        def next_step() -> float:
            seconds = self._step(module)
            if spoils:
                self._restore_spoilt()
            return seconds

        return steady_step_s(first_s, next_step)

    def _step(self, module: _Running) -> float:
        step = self._extraction.step
        # copied, since a model may modify the containers that it gets
        inputs, keywords = tree_map(lambda leaf: leaf, (step.step_inputs, dict(step.keywords)))
        self._wait()
        start = time.perf_counter()
        module.zero_grad(set_to_none=True)
        module.step(*inputs, **keywords)
        self._wait()
        return time.perf_counter() - start

    @torch.no_grad()
    def _restore_spoilt(self) -> bool:
        """Give parameters and buffers that a step made NaN or infinite the values of the model.

        Return whether there were any. Sums tell, since these take no memory.
        """
        state = self._extraction.step.named_state()
        spoilt = [
            name
            for name, tensor in self._written.items()
            if not _has_finite_sum(state[name]) and _has_finite_sum(tensor)
        ]
        for name in spoilt:
            state[name].copy_(self._written[name])
        return bool(spoilt)

    def _module_of(self, placement: Placement) -> _Running:
        if self._running is not None and self._there is placement:
            return self._running
        devices = [self._devices[d] for d in placement.devices]
        if placement.leaves_unplaced:
            self._running = UnplacedModel(self._extraction, device=devices[0])
        elif self._placed is None:
            self._running = self._placed = placed_module(
                self._extraction, self.calls, devices, placement.priority, overlap=self.overlap
            )
        else:
            where = self.calls.devices_of_calls(devices)
            self._placed.place(where, self.calls.launch_order(placement.priority))
            self._running = self._placed
        updates = self._extraction.step.optimizer is not None
        if updates and not isinstance(self._running, HookedModule):
            self._running.learning_rate = 0.0
        self._there = placement
        return self._running

    def _drop(self, failure: str) -> None:
        """Drop the placed module, which an error may have left incomplete."""
        try:
            self._clear()
        except RuntimeError as error:  # as of every call of CUDA after some errors
            must_fail = is_of_cuda(error) and not is_out_of_memory(error)
            self._lost.find(failure or _in_a_line(error), must_fail=must_fail)
            if isinstance(self._placed, PlacedModule):
                self._placed = None  # what it holds is lost
            self._clear()
        self._placed = None
        self._release()

    def _clear(self) -> None:
        """Empty the accelerators, which may have no room for the old and the new weights."""
        ran, self._running = self._there is not None, None
        if isinstance(self._placed, PlacedModule):
            self._placed.load_optimizer_state({})
            self._placed.drop_constants()
        state = self._extraction.step.named_state()
        changed = [name for name in self._written if ran and state[name].device == CPU]
        put_back(self._extraction.step, self._on_host)
        for name in changed:
            self._on_host[name].copy_(self._written[name])
        self._there = None
        if isinstance(self._placed, HookedModule):
            self._placed.close()  # the unplaced model has no hooks
        self._release()

    def _release(self) -> None:
        gc.collect()  # some tensors are in reference cycles
        for device in self._lost.usable:
            torch_devices.release(device)

    def _wait(self) -> None:
        for device in self._lost.usable:
            torch_devices.synchronize(device)

    def _peaks(self, peak: Callable[[torch.device], int | None]) -> dict[str, int]:
        """Return peaks of the step, without what was allocated before, by device."""
        peaks = {device: peak(device) for device in self._lost.usable}
        return {
            str(device): max(most - self._held_bytes[device], 0)
            for device, most in peaks.items()
            if most is not None
        }


class PlacementTurns:
    """Runs one placement in turns with the others of an executor, which loads it anew."""

    def __init__(
        self, run: Callable[[Placement], TimedStep | Failure], placement: Placement
    ) -> None:
        self._run = run
        self._placement = placement

    def warm_up(self) -> Failure | None:
        """Run the step once; return the failure if it fails."""
        step = self.run()
        return step if isinstance(step, Failure) else None

    def run(self) -> TimedStep | Failure:
        """Run a turn of the step."""
        return self._run(self._placement)

    def close(self) -> None:
        """Do nothing: what is loaded stays until the next placement's turn."""


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


def steady_step_s(first_s: float, next_step: Callable[[], float]) -> float:
    """Run steps until two in a row agree, then a turn of them; return the median of the turn."""
    before_s, step_s = np.inf, first_s
    for _ in range(MOST_WARM_UP):
        if abs(step_s / before_s - 1) <= AGREEMENT:
            break
        before_s, step_s = step_s, next_step()
    count = min(max(round(TURN_S / step_s), 1), MOST_STEPS)
    return float(np.median([step_s, *(next_step() for _ in range(count - 1))]))


def _has_finite_sum(tensor: torch.Tensor) -> bool:
    size = tensor.dtype.itemsize
    if size < 2 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True  # torch adds up no floats of 8 bits
    return cmath.isfinite(tensor.sum(dtype=torch.float32 if size == 2 else None).item())


def _in_a_line(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error)
    is_plain = isinstance(error, RuntimeError | ValueError) or line == name
    return line if is_plain else f"{name}: {line}"
