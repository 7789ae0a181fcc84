"""The Measured backend: runs placements on this machine's cores and times them.

All candidates are loaded at once and run in turn. Each round starts with another candidate, so that
neither changes of the machine's load nor the position in a round favours one of them; each is
judged by the median of its runs. The unplaced step on all cores can be run as often for comparison
(envs/reference.py). Besides the wall time, the CPU-clock time of a step is computed (``rebuilt_s``,
see envs/executor/rebuilt.py). Their ratio is the contention: above ``CONTENDED`` other processes
used the cores, and the CPU-clock time is more accurate.

In one uncounted run the workers report their peak memory: a placement that exceeds a device's
memory fails even if it ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from envs.backend import StepResult
from envs.executor.lists import Instruction, device_lists
from envs.executor.pool import StepRun, WorkerPool
from envs.executor.rebuilt import rebuilt_s
from envs.executor.state import load_example
from envs.executor.worker_error import WorkerError, WorkerMemoryError
from envs.measurement import Measurement, contended, infeasible, misfit, noise
from envs.placement import Placement
from envs.problem import Problem
from envs.profiling import once_more
from envs.reference import Reference
from envs.simulator import Simulator
from envs.simulator.schedule import run_order
from graphs.extract import Extraction

SHORT_STEP_S: Final = 0.02
UNCOUNTED_BYTES: Final = 4 << 20
"""Tolerance on a worker's resident memory, for allocations of Python itself."""


class _NoWorkersError(Exception):
    """The workers of a failed placement cannot be replaced."""


class _OverfullError(Exception):
    """A worker held more than its device has."""


class _Candidate:
    def __init__(self, failure: str, lists: list[list[Instruction]]) -> None:
        self.failure = failure
        self.lists = lists
        self.overfull = False
        self.peak_memory_bytes: dict[str, int] = {}
        self.runs: list[StepRun] = []

    def measurement(self, rounds: int, latency_s: float) -> Measurement:
        runs = self.runs[:rounds]
        return Measurement(
            wall_s=np.array([run.wall_s for run in runs]),
            rebuilt_s=np.array([rebuilt_s(self.lists, run.cpu_s, latency_s) for run in runs]),
            failure=self.failure,
            peak_memory_bytes=self.peak_memory_bytes,
            overfull=self.overfull,
        )


class Measured:
    """Times placements of an extracted step on ``core:*`` devices. Use as a context manager.

    After :meth:`measure`, ``reference`` is the measurement of the unplaced step on all cores, or
    None if it was not requested or there is only one device. It can fail independently, like a
    placement.

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
        self.reference: Measurement | None = None
        self._simulator = Simulator(problem)
        self._pool = self._new_pool()

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def evaluate(self, placements: Sequence[Placement]) -> list[StepResult]:
        """Time every placement; ``parts`` of each result describes its noise."""
        measurements = self.measure(placements)
        loaded = contended(measurements)
        return [
            self._result(placement, measurement, loaded)
            for placement, measurement in zip(placements, measurements, strict=True)
        ]

    def measure(
        self,
        placements: Sequence[Placement],
        progress: Callable[[int, int], None] | None = None,
        *,
        reference: bool = False,
    ) -> list[Measurement]:
        """Run placements in turn, ``rounds`` times each after the warm-up.

        ``progress`` is called with (runs done, total runs). A placement whose worker dies, hangs or
        cannot run an op is recorded as a failure, as is one of another graph or cluster; the others
        continue with new workers. If no new workers can be started, the rounds completed so far
        count, and placements without a completed run are failures. Ctrl-C also ends the measurement
        early: ``interrupted`` is set, and incomplete rounds do not count.

        With ``reference`` the unplaced step on all cores runs as often, after all placements,
        because its threads would disturb the next run; see ``self.reference``. Torch's threads have
        no common CPU clock, so its CPU-clock time is its wall time.
        """
        candidates = [
            _Candidate(why, [] if why else self._lists(placement))
            for placement in placements
            for why in [misfit(self.problem, placement)]
        ]
        self.interrupted = False
        self.reference = None
        also = reference and self.problem.device_count > 1
        total = (self.rounds + self.warm_up) * (len(placements) + also)
        done = itertools.count(1)

        def hear() -> None:
            if progress is not None:
                progress(next(done), total)

        try:
            self._run_rounds(candidates, hear)
            if also:
                self._run_reference(hear)
        except KeyboardInterrupt:
            self.interrupted = True
            self._pool.close()
        complete = min((len(c.runs) for c in candidates if not c.failure), default=self.rounds)
        return [candidate.measurement(complete, self.latency_s) for candidate in candidates]

    def _run_rounds(self, candidates: Sequence[_Candidate], hear: Callable[[], None]) -> None:
        numbers: dict[_Candidate, int] = {}
        for round_number in range(self.rounds + self.warm_up):
            counts = round_number >= self.warm_up
            for turn in range(len(candidates)):
                candidate = candidates[(turn + round_number) % len(candidates)]
                if not candidate.failure:
                    try:
                        run = self._run(candidate, numbers)
                        if counts:
                            candidate.runs.append(run)
                    except WorkerError as error:
                        candidate.failure = str(error)
                        candidate.overfull = isinstance(error, WorkerMemoryError)
                    except _OverfullError as error:
                        candidate.failure, candidate.overfull = str(error), True
                    except _NoWorkersError as error:
                        for other in candidates:
                            other.failure = other.failure or ("" if other.runs else str(error))
                        return
                hear()

    def _run_reference(self, hear: Callable[[], None]) -> None:
        reference = Reference(
            self.extraction, self.problem.cluster, step_timeout_s=self.step_timeout_s
        )
        try:
            for round_number in range(self.rounds + self.warm_up):
                reference.run(keep=round_number >= self.warm_up)
                hear()
        finally:
            reference.close()
            wall_s = np.array([run.wall_s for run in reference.runs])
            self.reference = Measurement(wall_s=wall_s, rebuilt_s=wall_s, failure=reference.failure)

    def _run(self, candidate: _Candidate, numbers: dict[_Candidate, int]) -> StepRun:
        # Workers are replaced if the last placement ended them. New workers start cold, so their
        # first runs never count. A short step runs once more before it counts: its time depends on
        # what ran before it.
        if self._pool.closed:
            numbers.clear()
            try:
                self._pool = self._new_pool()
            except (WorkerError, OSError) as error:
                raise _NoWorkersError(f"no new workers could be started: {error}") from error
        if candidate not in numbers:
            numbers[candidate] = self._pool.load(candidate.lists)
            self._pool.run(numbers[candidate])
            self._weigh(candidate, numbers[candidate])
        run = self._pool.run(numbers[candidate])
        return self._pool.run(numbers[candidate]) if run.wall_s < SHORT_STEP_S else run

    def _weigh(self, candidate: _Candidate, number: int) -> None:
        self._pool.count_memory()
        self._pool.run(number)
        candidate.peak_memory_bytes = self._pool.peak_memory_bytes()
        for name, held_bytes in candidate.peak_memory_bytes.items():
            limit_bytes = self.limits.get(name, held_bytes)
            if held_bytes > limit_bytes + UNCOUNTED_BYTES:
                raise _OverfullError(
                    f"the worker of {name} held {held_bytes / 1e6:.1f} MB, "
                    f"{(held_bytes - limit_bytes) / 1e6:.1f} MB more than it may: give it more "
                    f"(--memory {name}=...), or place fewer ops there"
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

    def _result(self, placement: Placement, seen: Measurement, loaded: bool) -> StepResult:
        if not seen.ok:
            return infeasible(seen)
        peaks = self._simulator.run(*placement.arrays()).peak_bytes.tolist()
        simulated = dict(zip(self.problem.cluster.names, peaks, strict=True))
        return StepResult(
            step_s=seen.step_s(contended=loaded),
            peak_memory_bytes={**simulated, **seen.peak_memory_bytes},
            parts=noise(seen),
        )
