"""The devices of this machine, by name: cores as devices that a pinned worker runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from envs.cluster import Cluster, Device

MOST_CORES: Final = 8
"""How many cores "auto" takes at most; more can be named."""


def discover(names: str = "auto") -> Cluster:
    """A cluster of this machine's cores, without links and speeds (see envs/calibrate.py).

    Args:
        names: comma-separated devices, ``core:N`` or a core set ``core:N-M``; "auto" takes every
            core that this process may run on, at most eight. Each gets an equal share of the
            memory that is free now.

    Raises:
        ValueError: a name is of no known form, names a core twice or one that is not there.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if names.strip() == "auto":
        chosen = [f"core:{core}" for core in allowed[:MOST_CORES]]
    else:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise ValueError("no devices were named; write for example core:0,core:1 or auto")
    taken: dict[int, str] = {}
    for name in chosen:
        for core in cores_of(name):
            if core in taken:
                raise ValueError(
                    f"devices {taken[core]} and {name} overlap in core {core}: every core can "
                    "belong to one device only"
                )
            taken[core] = name
    share = available_memory_bytes() // len(chosen)
    devices = tuple(
        Device(name=name, kind=kind_of(len(cores_of(name))), memory_bytes=share) for name in chosen
    )
    return Cluster(name="this-machine:" + ",".join(chosen), devices=devices)


def cores_of(name: str) -> tuple[int, ...]:
    """The cores of a device named ``core:0`` or ``core:0-3``.

    Raises:
        ValueError: the name has another form, or this process may not run on one of the cores.
    """
    kind, _, text = name.partition(":")
    first, dash, last = text.partition("-")
    if kind == "cuda" or name == "cpu":
        raise ValueError(
            f"device {name} cannot be used yet: placements run on pinned cores; name core:N or a "
            "core set core:N-M"
        )
    if kind != "core" or not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"there is no device {name!r}; write core:N or a core set core:N-M")
    low, high = int(first), int(last or first)
    if low > high:
        raise ValueError(f"device {name} is empty: write the lower core first")
    allowed = sorted(os.sched_getaffinity(0))
    cores = tuple(core for core in allowed if low <= core <= high)
    if len(cores) != high - low + 1:
        raise ValueError(
            f"there is no device {name}: this process may run on cores "
            f"{', '.join(map(str, allowed))}"
        )
    return cores


def kind_of(core_count: int) -> str:
    """Device kind of a set of cores: all sets of one size share their op costs."""
    return "core" if core_count == 1 else f"core*{core_count}"


def available_memory_bytes() -> int:
    """Free memory of this machine, or what its control group leaves, if that is less."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)
