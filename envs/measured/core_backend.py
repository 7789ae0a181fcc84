"""The backend that runs placements on this machine's pinned cores, and times them.

All candidates are loaded at once and run in turn. Each round starts with another candidate, so that
neither changes of the machine's load nor the position in a round favours one of them; each is
judged by the median of its runs. The baseline is the unplaced step, which one process runs on all
cores (:class:`UnplacedStep`); it can be run as often. Besides the wall time, the CPU-clock time of
a step is computed, see :func:`envs.executors.cores.lists.cpu_clock_s`. Their ratio is the
contention: above ``CONTENDED`` other processes used the cores, and the CPU-clock time is more
accurate.

In one uncounted run the workers report their peak memory: a placement that exceeds a device's
memory fails even if it ran.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from envs.backend import ProgressCallback, StepResult, measured_result, misfit
from envs.executors.cores.errors import WorkerError, WorkerMemoryError, once_more
from envs.executors.cores.lists import Instruction, cpu_clock_s, device_lists, single_list
from envs.executors.cores.pool import StepRun, WorkerPool
from envs.executors.cores.state import load_example
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import core_set, cores_of, kind_of
from envs.measurement import Measurement, MemoryExcess, contended
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.schedule import run_order
from graphs.extract import Extraction

SETTLE_S: Final = 0.02
"""OpenMP threads spin for a few milliseconds after their work, on cores that the next run needs."""


class UnplacedStep:
    """A step without placement, run by torch's threads on the cores of all devices."""

    def __init__(self, extraction: Extraction, cluster: Cluster, *, step_timeout_s: float) -> None:
        """Start its worker; errors, now or later, are stored in ``failure``."""
        self.runs: list[StepRun] = []
        self.failure = ""
        self._pool: WorkerPool | None = None
        cores = [core for name in cluster.names for core in cores_of(name)]
        device = Device(
            name=core_set(cores),
            kind=kind_of(len(cores)),
            memory_bytes=sum(device.memory_bytes for device in cluster.devices),
        )
        program = extraction.program
        try:
            self._pool = WorkerPool(
                program,
                [device],
                step_timeout_s=step_timeout_s,
                op_names=tuple(extraction.graph),
            )
            load_example(self._pool.arena, extraction.step)
            self._number = self._pool.load([single_list(program)])
        except (WorkerError, OSError) as error:
            self._fail(error)
        except BaseException:
            self.close()
            raise

    def run(self, *, keep: bool) -> None:
        """Run the step once, unless it failed before; the run counts if ``keep`` is set."""
        if self._pool is None or self.failure:
            return
        try:
            run = self._pool.run(self._number)
        except WorkerError as error:
            self._fail(error)
            return
        time.sleep(SETTLE_S)
        if keep:
            self.runs.append(run)

    def close(self) -> None:
        """End the worker."""
        if self._pool is not None:
            self._pool.close()

    def _fail(self, error: Exception) -> None:
        self.failure = str(error)
        self.close()


SHORT_STEP_S: Final = 0.02
UNCOUNTED_BYTES: Final = 4 << 20
"""Tolerance on a worker's resident memory, for allocations of Python itself."""


class _NoWorkersError(Exception):
    """The workers of a failed placement cannot be replaced."""


class _ExcessError(Exception):
    def __init__(self, excess: MemoryExcess) -> None:
        super().__init__(str(excess))
        self.excess = excess


class _LoadedPlacement:
    """The instruction lists of a placement, and its runs or the reason why there are none."""

    def __init__(self, failure: str, lists: list[list[Instruction]]) -> None:
        self.failure = failure
        self.lists = lists
        self.overfull = False
        self.excess: MemoryExcess | None = None
        self.peak_memory_bytes: dict[str, int] = {}
        self.runs: list[StepRun] = []

    def fail(self, error: WorkerError | _ExcessError) -> None:
        self.failure = str(error)
        self.overfull = isinstance(error, WorkerMemoryError | _ExcessError)
        self.excess = error.excess if isinstance(error, _ExcessError) else None

    def measurement(self, rounds: int, latency_s: float) -> Measurement:
        runs = self.runs[:rounds]
        return Measurement(
            wall_s=np.array([run.wall_s for run in runs]),
            cpu_clock_s=np.array([cpu_clock_s(self.lists, run.cpu_s, latency_s) for run in runs]),
            failure=self.failure,
            peak_memory_bytes=self.peak_memory_bytes,
            overfull=self.overfull,
            excess=self.excess,
        )


class Measured:
    """Times placements of an extracted step on ``core:*`` devices. Use as a context manager.

    ``interrupted`` tells whether Ctrl-C ended the last evaluation early.

    Args:
        extraction: the step.
        problem: its graph with costs, and the devices.
        limits: {device name: bytes} that each worker may use; the default is the device's memory.
        latency_s: latency of a hand-off between workers, for CPU-clock times.
        rounds: counted runs of every candidate.
        warm_up: uncounted rounds.
        step_timeout_s: a step that takes longer counts as hung.

    Raises:
        ValueError: a device is not a set of cores of this machine.
        WorkerError: the workers do not start.
        OSError: there is too little memory, or too many processes or open files.
    """

    def __init__(
        self,
        extraction: Extraction,
        problem: Problem,
        *,
        limits: Mapping[str, int] | None = None,
        latency_s: float = 15e-6,
        rounds: int = 7,
        warm_up: int = 2,
        step_timeout_s: float = 60.0,
    ) -> None:
        self.extraction = extraction
        self.problem = problem
        own = {device.name: device.memory_bytes for device in problem.cluster.devices}
        self.limits = own if limits is None else dict(limits)
        self.latency_s = latency_s
        self.rounds = rounds
        self.warm_up = warm_up
        self.step_timeout_s = step_timeout_s
        self.interrupted = False
        self._simulator = Simulator(problem)
        self._pool = self._new_pool()

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    @property
    def runs_each(self) -> int:
        """Number of runs of every placement, uncounted ones included."""
        return self.rounds + self.warm_up

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        """Run placements in turn, ``rounds`` times each after the warm-up.

        ``progress`` is called with (runs done, total runs). A placement whose worker dies, hangs or
        cannot run an op is recorded as a failure, as is one of another graph or cluster; the others
        continue with new workers. If no new workers can be started, the rounds completed so far
        count, and placements without a completed run are failures. Ctrl-C also ends the measurement
        early: ``interrupted`` is set, and incomplete rounds do not count.
        """
        loaded = [
            _LoadedPlacement(why, [] if why else self._lists(placement))
            for placement in placements
            for why in [misfit(self.problem, placement)]
        ]
        self.interrupted = False
        count_run = _counted(progress, self.runs_each * len(placements))
        try:
            self._run_rounds(loaded, count_run)
        except KeyboardInterrupt:
            self.interrupted = True
            self._pool.close()
        complete = min((len(one.runs) for one in loaded if not one.failure), default=self.rounds)
        seen = [one.measurement(complete, self.latency_s) for one in loaded]
        busy = contended(seen)
        return [
            measured_result(one, self._peaks(placement) if one.ok else {}, loaded=busy)
            for placement, one in zip(placements, seen, strict=True)
        ]

    def measure_unplaced(self, progress: ProgressCallback | None = None) -> Measurement | None:
        """Run the unplaced step on all cores, ``rounds`` times after the warm-up.

        It can fail like a placement, and be interrupted. Run it after all placements: its threads
        would disturb the next run. Torch's threads have no common CPU clock, so its CPU-clock time
        is its wall time.

        Returns:
            Its measurement, or None if there is only one device.
        """
        if self.problem.device_count < 2:
            return None
        count_run = _counted(progress, self.runs_each)
        self.interrupted = False
        step = None
        try:
            step = UnplacedStep(
                self.extraction, self.problem.cluster, step_timeout_s=self.step_timeout_s
            )
            for number in range(self.runs_each):
                step.run(keep=number >= self.warm_up)
                count_run()
        except KeyboardInterrupt:
            self.interrupted = True
            self._pool.close()
        finally:
            if step is not None:
                step.close()
        if step is None:
            return None
        wall_s = np.array([run.wall_s for run in step.runs])
        return Measurement(wall_s=wall_s, cpu_clock_s=wall_s, failure=step.failure)

    def _run_rounds(
        self, loaded: Sequence[_LoadedPlacement], count_run: Callable[[], None]
    ) -> None:
        numbers: dict[_LoadedPlacement, int] = {}
        for round_number in range(self.runs_each):
            for turn in range(len(loaded)):
                one = loaded[(turn + round_number) % len(loaded)]
                if not one.failure:
                    try:
                        run = self._run(one, numbers)
                        if round_number >= self.warm_up:
                            one.runs.append(run)
                    except (WorkerError, _ExcessError) as error:
                        one.fail(error)
                    except _NoWorkersError as error:
                        for other in loaded:
                            other.failure = other.failure or ("" if other.runs else str(error))
                        return
                count_run()

    def _run(self, loaded: _LoadedPlacement, numbers: dict[_LoadedPlacement, int]) -> StepRun:
        # Workers are replaced if the last placement ended them. New workers start cold, so their
        # first runs never count. A short step runs once more before it counts: its time depends on
        # what ran before it.
        if self._pool.closed:
            numbers.clear()
            try:
                self._pool = self._new_pool()
            except (WorkerError, OSError) as error:
                raise _NoWorkersError(f"no new workers could be started: {error}") from error
        if loaded not in numbers:
            numbers[loaded] = self._pool.load(loaded.lists)
            self._pool.run(numbers[loaded])
            self._weigh(loaded, numbers[loaded])
        run = self._pool.run(numbers[loaded])
        return self._pool.run(numbers[loaded]) if run.wall_s < SHORT_STEP_S else run

    def _weigh(self, loaded: _LoadedPlacement, number: int) -> None:
        self._pool.count_memory()
        self._pool.run(number)
        loaded.peak_memory_bytes = self._pool.peak_memory_bytes()
        for name, held_bytes in loaded.peak_memory_bytes.items():
            limit_bytes = self.limits.get(name, held_bytes)
            if held_bytes > limit_bytes + UNCOUNTED_BYTES:
                raise _ExcessError(
                    MemoryExcess(device=name, held_bytes=held_bytes, limit_bytes=limit_bytes)
                )

    def _lists(self, placement: Placement) -> list[list[Instruction]]:
        devices, priority = placement.arrays()
        schedule = self._simulator.run(devices, priority)
        return device_lists(
            self.extraction.program,
            placement.devices,
            run_order(self.problem, schedule.start_ns),
            self.problem.device_count,
        )

    def _new_pool(self) -> WorkerPool:
        pool = once_more(
            lambda: WorkerPool(
                self.extraction.program,
                self.problem.cluster.devices,
                step_timeout_s=self.step_timeout_s,
                op_names=self.problem.graph.ids,
            )
        )
        try:
            load_example(pool.arena, self.extraction.step)
        except BaseException:
            pool.close()
            raise
        return pool

    def _peaks(self, placement: Placement) -> dict[str, int]:
        peaks = self._simulator.run(*placement.arrays()).peak_bytes.tolist()
        return dict(zip(self.problem.cluster.names, peaks, strict=True))


def _counted(progress: ProgressCallback | None, total: int) -> Callable[[], None]:
    done = itertools.count(1)

    def count_run() -> None:
        if progress is not None:
            progress(next(done), total)

    return count_run
