"""Costs of ops on pinned cores, measured in context: workers run the whole step and time every op.

A call repeated alone finds its inputs in the cache and its memory mapped: sums of such times came
out up to a fifth below the step time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.costs.cached_costs import MeasuredCosts, first_of_kinds
from envs.costs.modules import MODULE_BY_MODULE, profile_modules
from envs.costs.signatures import op_signatures
from envs.executors.cores.arena import load_example
from envs.executors.cores.errors import once_more
from envs.executors.cores.instruction_lists import Run, single_list
from envs.executors.cores.pool import WorkerPool
from envs.hardware.cluster import Device
from graphs.extract import Extraction

WARM_UP: Final = 2
REPEATS: Final = 5
PROFILE_TIMEOUT_S: Final = 600.0


def core_costs(
    extraction: Extraction, progress: Callable[[int, int], None] | None = None
) -> MeasuredCosts:
    """Return the costs of the ops of a step on core sets of this machine, one of each kind.

    Ops of a graph of modules have no signature to cache them by. Measuring raises WorkerError where
    an op cannot run on a device, ExtractionError where modules cannot be timed.
    """
    if extraction.step_program is None:
        return MeasuredCosts(
            profile=functools.partial(profile_modules, extraction, progress=progress),
            method=MODULE_BY_MODULE,
        )
    return MeasuredCosts(
        profile=functools.partial(profile_runs, extraction, progress=progress),
        method=" in runs of the whole step",
        signatures=op_signatures(extraction.program),
    )


class Profiler:
    """Runs a step on one pinned device and times every op. Use as a context manager."""

    def __init__(self, extraction: Extraction, device: Device) -> None:
        """Start its worker."""
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

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def run(self) -> NDArray[np.float64]:
        """Return the seconds of every op in one run, (N,): its call and the views made for it.

        On one core this is thread CPU time, which excludes time when other processes use the core;
        on several cores it is wall time, since that clock does not include other threads.
        """
        times_s = self._pool.run(self._number).cpu_s[0].tolist()
        cost_s = np.zeros(self._program.op_count)
        for instruction, seconds in zip(self._list, times_s, strict=True):
            if isinstance(instruction, Run):
                cost_s[self._program.calls[instruction.call].op] = seconds
        return cost_s


def profile_runs(
    extraction: Extraction,
    devices: Sequence[Device],
    *,
    repeats: int = REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op in every run, {device kind: (repeats, N)}.

    The whole step runs on the first device of each kind. A worker that dies is replaced once.
    """
    first_of = first_of_kinds(devices)
    total = len(first_of) * (WARM_UP + repeats)
    done = itertools.count(1)

    def runs_on(device: Device) -> NDArray[np.float64]:
        runs: list[NDArray[np.float64]] = []
        with Profiler(extraction, device) as profiler:
            for _ in range(WARM_UP + repeats):
                runs.append(profiler.run())
                if progress is not None:
                    progress(min(next(done), total), total)
        return np.stack(runs[WARM_UP:])

    return {
        kind: once_more(functools.partial(runs_on, device))
        for kind, device in sorted(first_of.items())
    }
