"""Measures steps of unplaced models while two cores share a cache, and while they do not.

    python -m benchmarks cores

On a shared host two virtual cores may share a level-3 cache at one time and not at another. Threads
of torch meet after every op, so the unplaced model is slower while they do not. The table groups
steps by the time that a cache line takes from one core to the other and back.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from benchmarks.record import Effort, Part
from benchmarks.steps.models import MODELS
from benchmarks.tables import Table
from envs.executors.unplaced import UnplacedModel
from graphs.extract import extract

TRIPS: Final = 2000
REPEATS: Final = 3
APART: Final = 4.0
"""Cores are apart when a round trip takes this many times the shortest one seen."""
Step: TypeAlias = tuple[float, float, float]
"""Seconds of a step, and of a round trip before and after it."""
NAMES: Final = ("NASNet-A, training", "translation, inference", "transformer, inference")


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _load(_: Any, address: Any) -> Any:
    """Load the integer at an address, whatever other threads do with it."""

    def code(_: Any, builder: Any, __: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _store(_: Any, address: Any, value: Any) -> Any:
    """Store an integer at an address, so that other threads see it."""

    def code(context: Any, builder: Any, _: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        builder.store_atomic(values[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@njit(nogil=True)  # type: ignore[untyped-decorator]  # numba has no types
def _volley(address: int, trips: int, mine: int) -> None:
    """Wait for each number of this side, and answer with the next one."""
    for trip in range(trips):
        while _load(address) != 2 * trip + mine:
            pass
        _store(address, 2 * trip + mine + 1)


def round_trip_s() -> float:
    """Return the time of a cache line from the first core of this process to the second and back.

    It is the least of a few means.

    Raises:
        ValueError: this process has one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError("a round trip needs two cores")
    line = np.zeros(16, np.int64)
    address = line.ctypes.data
    _volley(address, 0, 0)  # compiled before anybody waits

    def answer() -> None:
        os.sched_setaffinity(0, cores[1:2])
        _volley(address, TRIPS, 1)

    means_s = []
    for _ in range(REPEATS):
        line[0] = 0
        other = threading.Thread(target=answer)
        other.start()
        os.sched_setaffinity(0, cores[:1])
        try:
            start_s = time.perf_counter()
            _volley(address, TRIPS, 0)
            means_s.append((time.perf_counter() - start_s) / TRIPS)
        finally:
            os.sched_setaffinity(0, cores)
            other.join()
    return min(means_s)


def unplaced(name: str, seconds: float, found: dict[str, Any]) -> Table:
    """Run steps of an unplaced model; group them by whether the cores share a cache."""
    extraction = extract(MODELS[name]())
    step = extraction.step
    model = UnplacedModel(extraction, sorted(os.sched_getaffinity(0))[:2])
    model.step(*step.step_inputs, **step.keywords)
    steps: list[Step] = []
    trip_s, end_s = round_trip_s(), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        model.step(*step.step_inputs, **step.keywords)
        step_s, before_s = time.perf_counter() - start_s, trip_s
        trip_s = round_trip_s()
        steps.append((step_s, before_s, trip_s))
    limit_s = APART * min(min(each[1:]) for each in steps)
    near = [each for each in steps if max(each[1:]) < limit_s]
    apart = [each for each in steps if min(each[1:]) >= limit_s]
    found.update(steps_s=steps, near=len(near), apart=len(apart))
    ratio = f"{median_s(apart) / median_s(near):.2f}" if near and apart else "-"
    return Table(
        "Cores",
        "steps of the unplaced model on two cores while a cache line takes the shorter time there "
        "and back, and while it takes the longer; medians in ms, with the share of steps",
        ("model", "round trip ns", "shared cache", "round trip ns", "apart", "apart / shared"),
        ((name, *_cells(near, len(steps)), *_cells(apart, len(steps)), ratio),),
    )


def median_s(steps: list[Step]) -> float:
    """Return the median time of some steps."""
    return statistics.median(each[0] for each in steps)


def _cells(steps: list[Step], count: int) -> tuple[str, str]:
    if not steps:
        return "-", "-"
    trip_s = statistics.median(each[2] for each in steps)
    return f"{trip_s * 1e9:.0f}", f"{median_s(steps) * 1e3:.1f} ({len(steps) / count:.0%})"


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each model."""
    seconds = effort.pick(quick=2.0, normal=60.0, full=120.0)
    names = NAMES[1:2] if effort.level == "quick" else NAMES
    return {name: partial(unplaced, name, seconds) for name in names}
