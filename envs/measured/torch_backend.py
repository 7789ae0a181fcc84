"""The backend that runs placements on torch devices, in this process, and times them.

Exported steps run call by call; steps with a graph of modules run the model's own code.

Candidates take turns as in :mod:`envs.measured.core_backend`. A turn moves the weights to the
candidate's devices, runs one uncounted step and then a few counted ones; their median is the time
of the round. Only wall time is known, so the CPU-clock time equals it. The clock runs between two
points at which all devices are idle: a CUDA event covers one stream of one device, but a step may
begin on one device, end on another and use the host in between.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch.utils._pytree import tree_map

from envs.backend import ProgressCallback, StepResult, measured_result, misfit
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.homes import put_back
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.torch.watchdog import ended_after
from envs.hardware import torch_devices
from envs.hardware.torch_devices import CPU, is_out_of_memory, torch_device
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.reasons import overfull_reason
from envs.simulator.schedule import Schedule, run_order
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph, ModuleMap
from graphs.workload import step_copy

DEFAULT_ROUNDS: Final = 7
TURN_S: Final = 0.2
UNLIMITED: Final = np.iinfo(np.int64).max
MOST_STEPS: Final = 10
"""Maximum number of counted steps per turn: as many as take about ``TURN_S``, at least one."""


class _Turns:
    """Results of the turns of one placement, or the reason why there are none."""

    def __init__(self, failure: str, *, overfull: bool = False) -> None:
        self.failure = failure
        self.overfull = overfull
        self.wall_s: list[float] = []
        self.peak_bytes: dict[str, int] = {}

    def keep_peaks(self, peaks: dict[str, int]) -> None:
        for name, size in peaks.items():
            self.peak_bytes[name] = max(size, self.peak_bytes.get(name, 0))

    def measurement(self, rounds: int) -> Measurement:
        wall_s = np.array(self.wall_s[:rounds])
        return Measurement(
            wall_s=wall_s,
            cpu_clock_s=wall_s,
            failure=self.failure,
            peak_memory_bytes=dict(self.peak_bytes),
            overfull=self.overfull,
        )


class MeasuredModule:
    """Times placements of a step on ``cuda:*`` and ``cpu``. Use as a context manager.

    It works on a copy of the model and keeps all values on the host as well: a new placement copies
    its weights from there to the accelerators, unless they are still there from its last turn, and
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
        rounds: counted turns of every candidate.
        warm_up: uncounted turns.
        turn_timeout_s: a turn that takes longer counts as hung. A hung op can only be ended with
            this process, which then exits with a message.
        overlap: run exported calls with copies that overlap with compute.

    Raises:
        ValueError: a device does not exist on this machine, or ``overlap`` is set for a graph of
            modules.
    """

    def __init__(
        self,
        extraction: Extraction,
        calls: CallGraph | ModuleMap,
        problem: Problem,
        *,
        limits: Mapping[str, int] | None = None,
        rounds: int = DEFAULT_ROUNDS,
        warm_up: int = 1,
        turn_timeout_s: float = 600.0,
        overlap: bool = False,
    ) -> None:
        self.calls = calls
        self.problem = problem
        self.rounds = rounds
        self.warm_up = warm_up
        self.turn_timeout_s = turn_timeout_s
        self.overlap = overlap
        if overlap:
            check_overlap(calls)
        self.interrupted = False
        self._devices = [torch_device(name) for name in problem.cluster.names]
        self._simulator = Simulator(problem)
        step = step_copy(extraction.step)
        self._extraction = replace(extraction, step=step)
        self._on_host = {name: t.detach().to(CPU) for name, t in step.named_state().items()}
        put_back(step, self._on_host)
        self._module: PlacedModule | HookedModule | None = None
        self._there: Placement | None = None  # the placement whose weights are in place
        self._open = ExitStack()
        limited = {torch_device(name): size for name, size in (limits or {}).items()}
        self._room_bytes = np.array(
            [
                limited.get(device, UNLIMITED) if device.type != "cuda" else UNLIMITED
                for device in self._devices
            ]
        )
        self._held_bytes = [torch_devices.held_bytes(device) for device in self._devices]
        self._open.enter_context(torch_devices.limited(limited))
        self._open.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))

    def __enter__(self) -> MeasuredModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the copy of the model and lift the memory limits."""
        self._drop()
        self._open.close()

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        """Run placements in turn, ``rounds`` times each after the warm-up.

        ``progress`` is called with (turns done, total turns). A placement that runs out of memory
        or that torch cannot run is recorded as a failure; the others continue. Ctrl-C ends the
        measurement early: ``interrupted`` is set, and only complete rounds count.
        """
        turns = [self._turns_of(placement) for placement in placements]
        self.interrupted = False
        done = itertools.count(1)
        total = (self.rounds + self.warm_up) * len(placements)
        try:
            for number in range(self.rounds + self.warm_up):
                for turn in range(len(placements)):
                    i = (turn + number) % len(placements)
                    self._turn(placements[i], turns[i], counts=number >= self.warm_up)
                    if progress is not None:
                        progress(next(done), total)
        except KeyboardInterrupt:
            self.interrupted = True
        whole = min((len(own.wall_s) for own in turns if not own.failure), default=self.rounds)
        seen = [own.measurement(whole) for own in turns]
        return [
            measured_result(one, self._simulated_peaks(placement) if one.ok else {})
            for placement, one in zip(placements, seen, strict=True)
        ]

    def _turns_of(self, placement: Placement) -> _Turns:
        why = misfit(self.problem, placement)
        full = "" if why else self._over_limit(placement)
        return _Turns(why or full, overfull=bool(full))

    def _over_limit(self, placement: Placement) -> str:
        # Devices whose allocators enforce no limit (all but CUDA) are checked by simulation.
        if (self._room_bytes == UNLIMITED).all():
            return ""
        try:
            schedule = self._simulator.run(*placement.arrays())
        except ValueError:  # a step longer than the simulator counts
            return ""
        return overfull_reason(
            self.problem, schedule.devices, schedule.peak_bytes, room_bytes=self._room_bytes
        )

    def _turn(self, placement: Placement, turns: _Turns, *, counts: bool) -> None:
        if turns.failure:
            return
        wall_s = self._tried(placement, turns)
        if turns.overfull or (counts and wall_s is not None):
            turns.keep_peaks(self._peaks())
        if wall_s is None:  # here the error and its frames, which hold tensors, are gone
            self._drop()
        elif counts:
            turns.wall_s.append(wall_s)

    def _tried(self, placement: Placement, turns: _Turns) -> float | None:
        # Returns the seconds of a step, or None if it failed; ``turns.failure`` then says why.
        try:
            with ended_after(self.turn_timeout_s, self._hung()):
                return self._steps(placement)
        except Exception as error:  # noqa: BLE001  # whatever the model's own code raises
            turns.overfull = is_out_of_memory(error)
            if turns.overfull:
                turns.failure = self._no_room(placement, error)
            else:
                turns.failure = f"torch cannot run it: {_in_a_line(error)}"
        return None

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
        updates = self._extraction.step.optimizer is not None
        if self._module is None:
            self._module = placed_module(
                self._extraction, self.calls, devices, placement.priority, overlap=self.overlap
            )
            if updates and isinstance(self._module, PlacedModule):
                self._module.learning_rate = 0.0
        else:
            where = self.calls.devices_of_calls(devices)
            self._module.place(where, self.calls.launch_order(placement.priority))
        self._there = placement
        return self._module

    def _drop(self) -> None:
        # An error may have left the placed module incomplete.
        self._clear()
        if isinstance(self._module, HookedModule):
            self._module.close()
        self._module = None
        gc.collect()  # some tensors are in reference cycles
        for device in self._devices:
            torch_devices.release(device)

    def _clear(self) -> None:
        # Empties the accelerators: they may have no room for the old and the new weights at once.
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
        # Peak memory of the step on each device that reports it, without what was allocated before.
        peaks = map(torch_devices.peak_bytes, self._devices)
        names = self.problem.cluster.names
        return {
            name: max(peak - held, 0)
            for name, peak, held in zip(names, peaks, self._held_bytes, strict=True)
            if peak is not None
        }

    def _hung(self) -> str:
        return (
            f"a step on {', '.join(self.problem.cluster.names)} was not over after "
            f"{self.turn_timeout_s:g} s: an op hangs, or a device does not answer. This process "
            "ends, since nothing else ends such an op"
        )

    def _no_room(self, placement: Placement, error: BaseException) -> str:
        peaks = self._simulated_peaks(placement)
        thought = ", ".join(f"{size / 1e9:.2f} GB on {name}" for name, size in peaks.items())
        return f"{_in_a_line(error)} (predicted: {thought})"

    def _simulated_peaks(self, placement: Placement) -> dict[str, int]:
        try:
            peaks = self._simulator.run(*placement.arrays()).peak_bytes.tolist()
        except ValueError:  # a step longer than the simulator counts
            return {}
        return dict(zip(self.problem.cluster.names, peaks, strict=True))


def placed_module(
    extraction: Extraction,
    calls: CallGraph | ModuleMap,
    devices: Sequence[torch.device],
    priority: Sequence[float],
    *,
    overlap: bool = False,
) -> PlacedModule | HookedModule:
    """Return the module of a step, placed on torch devices.

    Args:
        extraction: the step.
        calls: its graph of exported calls, which run one by one, or of modules, whose own code
            runs.
        devices: device of every node of ``calls``, (M,).
        priority: priority of every node, (M,); calls are launched in descending order.
        overlap: run with copies that overlap with compute.

    Raises:
        ValueError: ``overlap`` is set for a graph of modules.
    """
    if overlap:
        check_overlap(calls)
    where = calls.devices_of_calls(devices)
    if isinstance(calls, ModuleMap):
        return HookedModule(extraction, where)
    return PlacedModule(extraction, where, calls.launch_order(priority), overlap=overlap)


def check_overlap(calls: CallGraph | ModuleMap) -> None:
    """Check that copies can overlap with compute.

    Raises:
        ValueError: the model's own code runs, with hooks on its modules; says what to do.
    """
    if isinstance(calls, ModuleMap):
        raise ValueError(
            "a placed graph of modules runs the model's own code, which waits for each tensor that "
            "its hooks send: leave overlap out, it is for models that can be exported"
        )


def _in_a_line(error: BaseException) -> str:
    name, said = type(error).__name__, str(error).partition("\n")[0]
    if isinstance(error, RuntimeError | ValueError) and said:
        return said
    return f"{name}: {said}" if said else name


def launch_order(problem: Problem, schedule: Schedule) -> list[int]:
    """Return all ops in the order in which one process should launch them.

    Ops are ordered by simulated start, ops on the CPU by simulated end: an op on the CPU blocks
    launches until it is done, so whatever accelerators do meanwhile must be launched before it.
    """
    on_cpu = np.array([name == "cpu" for name in problem.cluster.names])
    launch_ns = np.where(on_cpu[schedule.devices], schedule.end_ns, schedule.start_ns)
    return run_order(problem, launch_ns)
