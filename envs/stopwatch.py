"""Timing on devices that run behind Python's back: many calls in a row, waited for once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from envs.torch_devices import synchronize

BURST_S: Final = 2e-3
MOST_CALLS: Final = 1000
REPEATS: Final = 5


def seconds_per_call(
    work: Callable[[], object],
    devices: Sequence[torch.device],
    *,
    burst_s: float = BURST_S,
    repeats: int = REPEATS,
) -> float:
    """Median seconds of a call among others of its kind.

    Calls follow each other without waiting, so that a call costs the longer of what the device
    works and what launching it takes. A burst is as many calls as last about ``burst_s``, one at
    least; the first call, which compiles and allocates, does not count.
    """
    burst(work, devices, 1)
    count = calls_per_burst(burst(work, devices, 1), burst_s)
    return float(np.median([burst(work, devices, count) for _ in range(repeats)])) / count


def calls_per_burst(call_s: float, burst_s: float = BURST_S) -> int:
    """How many calls make a burst."""
    return min(max(math.ceil(burst_s / max(call_s, 1e-9)), 1), MOST_CALLS)


def burst(work: Callable[[], object], devices: Sequence[torch.device], count: int) -> float:
    """Seconds that ``count`` calls in a row take, until all devices are done.

    A CUDA device alone is timed by its own clock, from the first kernel to the end of the last:
    neither the way of the first launch nor that of waiting counts, but gaps do in which the device
    waits for a launch.
    """
    for device in devices:
        synchronize(device)
    if len(devices) == 1 and devices[0].type == "cuda":
        return _burst_by_events(work, devices[0], count)
    start = time.perf_counter()
    for _ in range(count):
        work()
    for device in devices:
        synchronize(device)
    return time.perf_counter() - start


def _burst_by_events(work: Callable[[], object], device: torch.device, count: int) -> float:
    event: Any = torch.cuda.Event  # torch leaves it untyped
    with torch.cuda.device(device):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
