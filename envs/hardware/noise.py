"""Noise of this machine: other load on its cores, and how much the time of a fixed task varies."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

SIZE: Final = 192
"""Rows of the timed square matrix product, which takes 0.2 to 0.5 ms on a core."""
BURSTS: Final = 200
WARM_UP: Final = 20
CPUS: Final = Path("/sys/devices/system/cpu")
GROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Timing statistics of equal tasks, run one after the other on one core."""

    core: int
    median_s: float
    spread: float  # interquartile range, relative to the median
    contention: float  # wall over CPU time; above 1, others used the core


def noise_of(core: int, *, bursts: int = BURSTS) -> Noise:
    """Time ``bursts`` equal tasks on a core that this process may run on, about 0.1 s in all."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    left = torch.full((SIZE, SIZE), 0.5)
    wall_s = np.empty(bursts)
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        for _ in range(WARM_UP):
            left @ left
        cpu_began = time.thread_time()
        for k in range(bursts):
            began = time.perf_counter()
            left @ left
            wall_s[k] = time.perf_counter() - began
        cpu_s = time.thread_time() - cpu_began
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)
    low, middle, high = np.percentile(wall_s, [25, 50, 75]).tolist()
    return Noise(
        core=core,
        median_s=middle,
        spread=(high - low) / middle,
        contention=max(float(wall_s.sum()) / cpu_s, 1.0) if cpu_s else 1.0,
    )


def quota_cores(groups: Path = GROUPS) -> float | None:
    """Return the CPU quota of the control group (version 2) in cores, or None without a limit."""
    try:
        limit, period = (groups / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def governors(cores: list[int], cpus: Path = CPUS) -> set[str]:
    """Return the frequency governors of these cores; empty if the system does not report them."""
    paths = [cpus / f"cpu{core}" / "cpufreq" / "scaling_governor" for core in cores]
    return {path.read_text(encoding="ascii").strip() for path in paths if path.exists()}
