"""The devices of this machine, by name: cores as devices that a pinned worker runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from envs.cluster import Cluster, Device

MOST_CORES: Final = 8
"""How many cores "auto" takes at most; more can be named."""


def discover(names: str = "auto") -> Cluster:
    """A cluster of this machine's cores, without links and speeds (see envs/calibrate.py).

    Args:
        names: comma-separated devices, ``core:N`` or a core set, ``core:N-M`` or, with gaps,
            ``core:N+M-K``; "auto" takes every core that this process may run on, at most eight
            and one thread of each. Each gets an equal share of the memory that is free now.

    Raises:
        ValueError: a name is of no known form, names a core twice or one that is not there.
    """
    if names.strip() == "auto":
        chosen = [f"core:{core}" for core in own_cores()[:MOST_CORES]]
    else:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise ValueError("no devices were named; write for example core:0,core:1 or auto")
    check_cores(chosen)
    share = available_memory_bytes() // len(chosen)
    devices = tuple(
        Device(name=name, kind=kind_of(len(cores_of(name))), memory_bytes=share) for name in chosen
    )
    return Cluster(name="this-machine:" + ",".join(chosen), devices=devices)


def own_cores() -> list[int]:
    """Cores that this process may run on; of the hardware threads of one core only the first."""
    allowed = sorted(os.sched_getaffinity(0))
    firsts: dict[str, int] = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        key = siblings.read_text(encoding="ascii").strip() if siblings.exists() else str(core)
        firsts.setdefault(key, core)
    return sorted(firsts.values())


def check_cores(names: Sequence[str]) -> None:
    """Make sure that devices are cores of this machine, each core in one device only.

    Raises:
        ValueError: a name is of no known form, names a core twice or one that is not there.
    """
    taken: dict[int, str] = {}
    for name in names:
        for core in cores_of(name):
            if core in taken:
                raise ValueError(
                    f"devices {taken[core]} and {name} overlap in core {core}: every core can "
                    "belong to one device only"
                )
            taken[core] = name


def cores_of(name: str) -> tuple[int, ...]:
    """The cores of a device named ``core:0``, ``core:0-3`` or ``core:0+2-3``, in order.

    Raises:
        ValueError: the name has another form or names a core twice, or this process may not run
            on one of the cores.
    """
    kind, _, text = name.partition(":")
    if kind == "cuda" or name == "cpu":
        raise ValueError(
            f"device {name} cannot be used yet: placements run on pinned cores; name core:N or a "
            "core set core:N-M"
        )
    allowed = sorted(os.sched_getaffinity(0))
    cores: list[int] = []
    for part in text.split("+"):
        first, dash, last = part.partition("-")
        if kind != "core" or not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(
                f"there is no device {name!r}; write core:N or a core set core:N-M or core:N+M"
            )
        low, high = int(first), int(last or first)
        if low > high:
            raise ValueError(f"device {name} is empty: write the lower core first")
        found = [core for core in allowed if low <= core <= high]
        if len(found) != high - low + 1:
            raise ValueError(
                f"there is no device {name}: this process may run on cores "
                f"{', '.join(map(str, allowed))}"
            )
        cores += found
    if len(set(cores)) < len(cores):
        raise ValueError(f"device {name} names a core twice")
    return tuple(sorted(cores))


def is_here(name: str) -> bool:
    """Whether a device is a set of cores that this process may run on."""
    return not why_not_here(name)


def why_not_here(name: str) -> str:
    """Why a device cannot be used on this machine, "" if it can."""
    try:
        cores_of(name)
    except ValueError as error:
        return str(error)
    return ""


def core_set(cores: Iterable[int]) -> str:
    """The name of a set of cores as one device, such as ``core:0-3`` or ``core:0+2``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return "core:" + "+".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def kind_of(core_count: int) -> str:
    """Device kind of a set of cores: all sets of one size share their op costs."""
    return "core" if core_count == 1 else f"core*{core_count}"


def available_memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Free memory of this machine, or what its control group (version 2) leaves, if that is less.

    File pages that nobody uses count as free, as they do in MemAvailable.
    """
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used, parts = (groups / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        stat = (
            dict(line.split() for line in parts.read_text().splitlines()) if parts.exists() else {}
        )
        reclaimable = int(stat.get("inactive_file", 0))
        free = min(free, int(text) - int(used.read_text()) + reclaimable)
    return max(free, 0)
