"""Measure op costs in context: run the whole step on one device and time every call.

A call repeated alone finds its inputs in the cache and its memory mapped: sums of such times came
out up to a fifth below the step time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from envs.cluster import Cluster, Device
from envs.executor.lists import Instruction, Run, device_lists
from envs.executor.pool import WorkerPool
from envs.executor.state import load_example
from envs.executor.worker_error import WorkerError
from graphs.extract import Extraction
from graphs.extract.program import StepProgram

WARM_UP: Final = 2
REPEATS: Final = 5
PROFILE_TIMEOUT_S: Final = 600.0
Result = TypeVar("Result")


class Profiler:
    """Runs a step on one pinned device and times every op. Use as a context manager."""

    def __init__(self, extraction: Extraction, device: Device) -> None:
        """Start its worker.

        Raises:
            ValueError: the device is not a set of cores of this machine.
            WorkerError: the worker does not start.
            OSError: there is too little memory, or too many processes or open files.
        """
        self._program = extraction.program
        self._list = single_list(self._program)
        self._pool = WorkerPool(
            self._program,
            [device],
            op_names=tuple(extraction.graph),
            step_timeout_s=PROFILE_TIMEOUT_S,
        )
        try:
            load_example(self._pool.arena, extraction.step)
            self._number = self._pool.load([self._list])
        except BaseException:
            self._pool.close()
            raise

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.close()

    def run(self) -> NDArray[np.float64]:
        """Return the seconds of every op in one run, (N,): its call and the views made for it.

        On one core this is thread CPU time, which excludes time when other processes use the core;
        on several cores it is wall time, since that clock does not include other threads.

        Raises:
            WorkerError: an op cannot run on the device, or the worker died.
        """
        times_s = self._pool.run(self._number).cpu_s[0].tolist()
        cost_s = np.zeros(self._program.op_count)
        for instruction, seconds in zip(self._list, times_s, strict=True):
            if isinstance(instruction, Run):
                cost_s[self._program.calls[instruction.call].op] = seconds
        return cost_s


def single_list(program: StepProgram) -> list[Instruction]:
    """Return the instructions of a step that runs on one device, in program order."""
    return device_lists(program, [0] * program.op_count, range(program.op_count), 1)[0]


def profile_ops(
    extraction: Extraction,
    cluster: Cluster,
    *,
    repeats: int = REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op in context, {device kind: (N,)}: the median of its runs.

    Raises:
        WorkerError: an op cannot run on a device, or its worker died twice.
    """
    runs_s = profile_runs(extraction, cluster.devices, repeats=repeats, progress=progress)
    return {kind: np.median(runs, axis=0) for kind, runs in runs_s.items()}


def profile_runs(
    extraction: Extraction,
    devices: Sequence[Device],
    *,
    repeats: int = REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op in every run, {device kind: (repeats, N)}.

    The whole step runs on the first device of each kind.

    Raises:
        WorkerError: an op cannot run on a device, or its worker died twice.
    """
    first_of = {device.kind: device for device in reversed(devices)}
    total = len(first_of) * (WARM_UP + repeats)
    done = itertools.count(1)

    def hear() -> None:
        if progress is not None:
            progress(min(next(done), total), total)

    return {
        kind: once_more(functools.partial(_runs, extraction, device, repeats, hear))
        for kind, device in sorted(first_of.items())
    }


def _runs(
    extraction: Extraction, device: Device, repeats: int, hear: Callable[[], None]
) -> NDArray[np.float64]:
    runs: list[NDArray[np.float64]] = []
    with Profiler(extraction, device) as profiler:
        for _ in range(WARM_UP + repeats):
            runs.append(profiler.run())
            hear()
    return np.stack(runs[WARM_UP:])


def once_more(work: Callable[[], Result]) -> Result:
    """Call ``work`` and retry once after a WorkerError: something may have killed a worker."""
    try:
        return work()
    except WorkerError:
        return work()
