"""Runs placed steps on pinned cores to measure them, and the unplaced model beside them.

Ops are run by workers; modules of a graph of modules, like the unplaced model, by this process.

Besides the wall time, the CPU-clock time of a step is computed, see
:func:`envs.executors.cores.instruction_lists.cpu_clock_s`. In one uncounted run the workers report
their peak memory: a placement that exceeds a device's memory fails even if it ran.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.utils._pytree import tree_map

from envs.executors.cores.arena import load_example
from envs.executors.cores.errors import WorkerError, WorkerMemoryError, once_more
from envs.executors.cores.hand_over import HandOver
from envs.executors.cores.instruction_lists import (
    Instruction,
    cpu_clock_s,
    device_lists,
)
from envs.executors.cores.pool import WorkerPool
from envs.executors.modules_on_cores import ModulesOnCores
from envs.executors.process_settings import end_idle_threads
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import (
    core_set,
    cores_of,
    is_local_core_set,
    kind_of,
    pinned,
)
from envs.hardware.torch_devices import is_out_of_memory
from envs.measured import (
    DevicesLostError,
    Failure,
    LoadedStep,
    TimedStep,
    turn,
)
from envs.measurement import MemoryExcess
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.schedule import run_order
from graphs.extract import Extraction
from graphs.extract.placeable import module_map
from graphs.workload import Workload, step_copy

MakeModel: TypeAlias = "Callable[[Extraction], UnplacedModel]"
"""Makes a model that runs its own code, of an extraction."""


class CoreExecutor:
    """Runs placed steps of an extraction on ``core:*`` devices, each driven by a worker.

    A placement whose worker dies, hangs or cannot run an op fails; the next one gets new workers.

    The workers start with the first placement of ops; own code of a model needs none. Each may use
    ``limits`` {device name: bytes} of memory, by default that of its device.
    Times are those of ``placed.step``, with the batch and the results; where the model cannot be
    copied, those of the workers alone. CPU-clock times include ``latency_s`` per hand-off between
    workers.
    """

    def __init__(
        self,
        extraction: Extraction,
        problem: Problem,
        *,
        limits: Mapping[str, int] | None = None,
        latency_s: float = 15e-6,
        step_timeout_s: float = 60.0,
    ) -> None:
        self.extraction = extraction
        self.problem = problem
        memory_bytes = {device.name: device.memory_bytes for device in problem.cluster.devices}
        self.limits = memory_bytes if limits is None else dict(limits)
        self.latency_s = latency_s
        self.step_timeout_s = step_timeout_s
        device = joined_device(problem.cluster.devices)
        self.joined = None if device is None else alone(device)
        self._simulator = Simulator(problem)
        self._step: Workload | None = None
        self._pool: WorkerPool | None = None
        self._handed: HandOver | None = None

    def load(self, placement: Placement) -> LoadedStep | Failure:
        """Return the step as placed; its workers get their instructions when it first runs."""
        if runs_unplaced(placement):
            return self._load_own_code(unplaced(placement), placement)
        if refusal := self.extraction.core_refusal:
            return Failure(reason=refusal)
        if self.extraction.step_program is None:
            return self._load_own_code(modules_placed(placement), placement)
        if self._pool is None:
            self._pool = self._new_pool()
        schedule = self._simulator.run(*placement.arrays())
        lists = device_lists(
            self.extraction.program,
            placement.devices,
            run_order(self.problem, schedule.start_ns, schedule.end_ns),
            self.problem.device_count,
        )
        return _PlacedStep(self, lists)

    def _load_own_code(self, make: MakeModel, placement: Placement) -> LoadedStep | Failure:
        try:
            return _OwnCodeStep(self.extraction, make, placement.used_devices)
        except Exception as error:  # noqa: BLE001  # as the model's own code raises it
            return Failure(reason=f"the model cannot be copied: {error}")

    def pool(self) -> WorkerPool:
        """Return the workers; new ones if the last placement ended them."""
        if self._pool is None or self._pool.closed:
            try:
                self._pool = self._new_pool()
            except (WorkerError, OSError) as error:
                raise DevicesLostError(f"no new workers could be started: {error}") from error
        return self._pool

    def timed(self, number: int, lists: Sequence[Sequence[Instruction]]) -> TimedStep:
        """Run the lists with this number as ``placed.step`` does, and time all of it."""
        pool, handed, step = self.pool(), self._handed, self._step
        if handed is None or step is None:
            run = pool.run(number)
            cpu_s = cpu_clock_s(lists, run.cpu_s, self.latency_s)
            return TimedStep(wall_s=run.wall_s, cpu_clock_s=cpu_s)
        for tensor in step.named_state().values():
            tensor.grad = None
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        _, run = handed.step(lambda: pool.run(number), step.step_inputs, step.keywords)
        return TimedStep(
            wall_s=time.perf_counter() - start_s,
            cpu_clock_s=time.thread_time()
            - start_cpu_s
            + cpu_clock_s(lists, run.cpu_s, self.latency_s),
        )

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def _new_pool(self) -> WorkerPool:
        devices, timeout_s = self.problem.cluster.devices, self.step_timeout_s
        pool = once_more(lambda: _pool_with_example(self.extraction, devices, timeout_s))
        self._step = self._step or _copy_of(self.extraction)
        if self._step is not None:
            self._handed = HandOver(pool.arena, self._step, self.extraction.outputs)
            self._handed.share()
        return pool


class _PlacedStep:
    """The instruction lists of a placement, and their number in the workers that have them."""

    def __init__(self, executor: CoreExecutor, lists: list[list[Instruction]]) -> None:
        self._executor = executor
        self._lists = lists
        self._pool: WorkerPool | None = None
        self._number = 0
        self._peak_memory_bytes: dict[str, int] = {}

    def warm_up(self) -> Failure | None:
        """Give workers that do not have them the lists, and run them twice: new workers are cold.

        The second run counts memory, and maps again what counting released.
        """
        pool = self._executor.pool()
        if self._pool is pool:
            return None
        try:
            self._pool, self._number = pool, pool.load(self._lists)
            pool.run(self._number)
            excess = self._memory_excess(pool)
        except WorkerError as error:
            return self._failure(error)
        return self._failure(excess) if excess else None

    def run(self) -> TimedStep | Failure:
        """Run its turn."""
        if failure := self.warm_up():
            return failure
        try:
            step = turn(lambda: self._executor.timed(self._number, self._lists))
        except WorkerError as error:
            return self._failure(error)
        return replace(step, peak_memory_bytes=self._peak_memory_bytes)

    def close(self) -> None:
        """Let the workers forget the lists."""
        if self._pool is not None and not self._pool.closed:
            with suppress(WorkerError):
                self._pool.unload(self._number)

    def _memory_excess(self, pool: WorkerPool) -> MemoryExcess | None:
        """Measure the peak memory of a run; return what exceeds the limit of a device."""
        pool.count_memory(self._number)
        pool.run(self._number)
        self._peak_memory_bytes = pool.peak_memory_bytes()
        for name, held_bytes in self._peak_memory_bytes.items():
            limit_bytes = self._executor.limits.get(name, held_bytes)
            if held_bytes > limit_bytes:
                return MemoryExcess(device=name, held_bytes=held_bytes, limit_bytes=limit_bytes)
        return None

    def _failure(self, reason: WorkerError | MemoryExcess) -> Failure:
        return Failure(
            reason=str(reason),
            overfull=isinstance(reason, WorkerMemoryError | MemoryExcess),
            excess=reason if isinstance(reason, MemoryExcess) else None,
            peak_memory_bytes=self._peak_memory_bytes,
        )


class _OwnCodeStep:
    """The step of a model that runs its own code, in this process on a copy of it.

    Several threads of torch have no common CPU clock: the CPU-clock time is then the wall time.
    """

    def __init__(self, extraction: Extraction, make: MakeModel, devices: Sequence[str]) -> None:
        step = step_copy(extraction.step)
        self._model = make(replace(extraction, step=step))
        if step.optimizer is not None:
            self._model.learning_rate = 0.0
        self._step = step
        cores = [cores_of(device) for device in devices]
        self._cores = sorted(itertools.chain(*cores))
        self._has_clock = all(len(each) == 1 for each in cores)

    def warm_up(self) -> Failure | None:
        """Run a turn."""
        step = self.run()
        return step if isinstance(step, Failure) else None

    def run(self) -> TimedStep | Failure:
        """Run its turn."""
        try:
            with torch.random.fork_rng([]), pinned(self._cores):
                step = turn(self._timed)
        except Exception as error:  # noqa: BLE001  # whatever the model's own code raises
            return Failure(reason=f"torch cannot run it: {error}", overfull=is_out_of_memory(error))
        end_idle_threads()
        return step

    def _timed(self) -> TimedStep:
        # copied, since a model may modify the containers that it gets
        inputs, keywords = tree_map(
            lambda leaf: leaf, (self._step.step_inputs, dict(self._step.keywords))
        )
        self._model.zero_grad(set_to_none=True)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        self._model.step(*inputs, **keywords)
        wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
        return TimedStep(wall_s=wall_s, cpu_clock_s=cpu_s if self._has_clock else None)

    def close(self) -> None:
        """Remove the hooks, if there are any; the copy goes with this object."""
        self._model.close()


def _copy_of(extraction: Extraction) -> Workload | None:
    """Return a copy of the step, which measuring may update; None if it cannot be copied."""
    try:
        return step_copy(extraction.step)
    except Exception:  # noqa: BLE001  # as the model's own code raises it
        return None


def joined_device(devices: Sequence[Device]) -> Device | None:
    """Return the device of all cores of some core sets; None for a single core."""
    if not all(is_local_core_set(device.name) for device in devices):
        return None
    cores = sorted({core for device in devices for core in cores_of(device.name)})
    if len(cores) < 2:
        return None
    memory_bytes = sum(device.memory_bytes for device in devices)
    return Device(name=core_set(cores), kind=kind_of(len(cores)), memory_bytes=memory_bytes)


def alone(device: Device) -> Cluster:
    """Return the cluster of one device of this machine."""
    return Cluster(name=f"this-machine:{device.name}", devices=(device,))


def is_joined(names: Sequence[str]) -> bool:
    """Return whether there is one device, of several cores: a model runs on it unplaced."""
    return len(names) == 1 and is_local_core_set(names[0]) and len(cores_of(names[0])) > 1


def unplaced(placement: Placement) -> MakeModel:
    """Return what makes the unplaced model of an extraction on the only device of a placement."""
    [device] = placement.used_devices
    return lambda extraction: UnplacedModel(extraction, cores_of(device))


def modules_placed(placement: Placement) -> MakeModel:
    """Return what makes the placed model of an extraction whose graph is of modules."""
    cores = [cores_of(placement.device_names[d]) for d in placement.devices]
    return lambda extraction: ModulesOnCores(
        extraction, module_map(extraction).devices_of_calls(cores)
    )


def runs_unplaced(placement: Placement) -> bool:
    """Return whether a model runs unplaced: left so by its placement, or by its only device."""
    return placement.leaves_unplaced or is_joined(placement.device_names)


def _pool_with_example(
    extraction: Extraction, devices: Sequence[Device], step_timeout_s: float
) -> WorkerPool:
    """Return workers whose shared memory holds the state and the example inputs of the step."""
    pool = WorkerPool(
        extraction.program,
        devices,
        step_timeout_s=step_timeout_s,
        op_names=tuple(extraction.graph),
    )
    try:
        load_example(pool.arena, extraction.step)
    except BaseException:
        pool.close()
        raise
    return pool
