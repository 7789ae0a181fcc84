"""Timing on asynchronous devices: many calls in a row, synchronized once."""

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
    """Return the median seconds per call when calls follow each other without waiting.

    A call thus costs the longer of its device time and its launch time. A burst is as many calls as
    take about ``burst_s``, at least one; the first call, which compiles and allocates, is not
    counted.
    """
    burst(work, devices, 1)
    count = calls_per_burst(burst(work, devices, 1), burst_s)
    return float(np.median([burst(work, devices, count) for _ in range(repeats)])) / count


def calls_per_burst(call_s: float, burst_s: float = BURST_S) -> int:
    """Return the number of calls in a burst."""
    return min(max(math.ceil(burst_s / max(call_s, 1e-9)), 1), MOST_CALLS)


def burst(work: Callable[[], object], devices: Sequence[torch.device], count: int) -> float:
    """Return the seconds of ``count`` calls in a row, until all devices are done.

    A single CUDA device is timed by events, from the first kernel to the end of the last: the
    latency of the first launch and of the final wait is excluded, gaps in which the device waits
    for a launch are included.
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
    event: Any = torch.cuda.Event  # untyped in torch
    with torch.cuda.device(device):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
