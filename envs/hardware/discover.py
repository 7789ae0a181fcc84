"""Devices of this machine, discovered by name, and the parts of device names.

``cuda:0`` and ``cpu`` are torch devices, driven from one process; ``core:0`` and core sets such as
``core:0-3`` are run by pinned worker processes. One placement uses either torch devices or cores,
not both. In clusters of several hosts the host comes first: ``n1:g0``, ``n1:cuda:0``.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from envs.hardware.cluster import Cluster, Device
from envs.hardware.core_sets import check_core_sets, core_runs
from envs.hardware.errors import VISIBLE, DeviceWarning, UnavailableError
from envs.hardware.host import Host
from graphs.strict_json import brief
from graphs.text import suggestion

MOST_CORES: Final = 8
"""Maximum number of cores that "auto" takes; more can be named."""
HIDING: Final = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose; the last is that of SLURM."""
_SCHED_GETCPU: Final = ctypes.CDLL(None).sched_getcpu  # glibc and musl have it


def discover(names: str = "auto", memory: Mapping[str, int] | None = None) -> Cluster:
    """Return a cluster of this machine's devices, without links and speeds.

    Torch devices have a host, the thread of this process, if there is an accelerator.

    Args:
        names: comma-separated devices: ``cuda:N`` and ``cpu`` (all cores together), or ``core:N``
            and core sets, ``core:N-M`` or, with gaps, ``core:N+M-K``. "auto" takes all CUDA devices
            that can be used, and cpu; without a CUDA device, one hardware thread of each core that
            this process may run on, at most eight.
        memory: {device name: bytes} that placements may use on each device. The default is the
            memory that is free now; cores share it equally.

    Raises:
        UnavailableError: this machine lacks a named device, or the memory.
    """
    if names.strip() == "auto":
        cuda = usable_gpus()
        cores = [f"core:{core}" for core in physical_cores()[:MOST_CORES]]
        chosen = [*cuda, "cpu"] if cuda else cores
    else:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise ValueError("no devices were named; write for example cuda:0,cpu or core:0,core:1")
    check_devices(chosen)
    limits = dict(memory or {})
    for name in limits:
        if name not in chosen:
            raise ValueError(
                f"memory of {name} is limited, but the devices are {', '.join(chosen)}"
                f"{suggestion(name, chosen)}"
            )
    shares = len(chosen) if is_core(chosen[0]) else 1
    free = available_memory_bytes()  # once, so that cores are alike
    devices = [_device(name, limits.get(name), shares, free) for name in chosen]
    name = "this-machine:" + ",".join(chosen)
    return Cluster(name=name, devices=tuple(devices), hosts=_hosts(chosen))


def usable_gpus() -> list[str]:
    """Return the names of all CUDA devices that can be used, and warn of what is not there."""
    from envs.hardware import torch_devices

    named, usable = torch_devices.cuda_devices(), []
    for name in named:
        if reason := torch_devices.unusable_reason(name):
            warnings.warn(f"{name} is left out: {reason}", DeviceWarning, stacklevel=3)
        else:
            usable.append(name)
    visible = os.environ.get(VISIBLE, "").strip()
    if not named and visible not in HIDING:
        reason = brief(f"there is no GPU that {VISIBLE}={visible!r} names: cores are used")
        warnings.warn(reason, DeviceWarning, stacklevel=3)
    return usable


def _hosts(names: Sequence[str]) -> tuple[Host, ...]:
    """Return the thread that issues ops of torch devices; none for cores, or the CPU alone."""
    if is_core(names[0]) or set(names) == {"cpu"}:
        return ()
    return (Host(devices=tuple(names), autograd=True),)


def present(names: Sequence[str]) -> Cluster:
    """Return a cluster of the named devices with their kinds, and memory 0."""
    check_devices(names)
    devices = (Device(name=name, kind=device_kind(name), memory_bytes=0) for name in names)
    return Cluster(name="this-machine:" + ",".join(names), devices=tuple(devices))


def check_devices(names: Sequence[str]) -> None:
    """Check that all devices exist on this machine, once, and that one executor can run them."""
    cores = [name for name in names if is_core(name)]
    others = [name for name in names if not is_core(name)]
    if not others:
        check_cores(names)
        return
    from envs.hardware.torch_devices import torch_device

    for name in others:
        torch_device(name)
    if cores:
        raise ValueError(
            f"{', '.join(cores)} and {', '.join(others)} cannot share a placement: worker "
            "processes run pinned cores, one process runs torch devices. Name cpu for all cores"
        )
    for name in others:
        if others.count(name) > 1:
            raise ValueError(f"device {name} is named more than once")


def _device(name: str, limit: int | None, shares: int, here_bytes: int) -> Device:
    """Return a device with its memory limit, or else its share of the free memory."""
    free: int | None
    if is_core(name) or name == "cpu":
        free = here_bytes
    else:
        from envs.hardware import torch_devices

        device = torch_devices.torch_device(name)
        if device.type == "cuda" and (reason := torch_devices.kernel_failure(device)):
            raise torch_devices.DeviceError([device], reason)
        free = torch_devices.free_bytes(device)
    if limit is None:
        if free is None:
            raise ValueError(f"{name} does not report its memory: set a limit for it, such as 8GiB")
        limit = free // shares
    elif free is not None and limit > free:
        reason = f"{name} cannot have {limit} bytes of memory: {free} bytes are free"
        raise UnavailableError(reason)
    return Device(name=name, kind=device_kind(name), memory_bytes=limit)


def physical_cores() -> list[int]:
    """Return the cores this process may run on, one hardware thread per physical core."""
    allowed = sorted(os.sched_getaffinity(0))
    firsts: dict[str, int] = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        key = siblings.read_text(encoding="ascii").strip() if siblings.exists() else str(core)
        firsts.setdefault(key, core)
    return sorted(firsts.values())


def check_cores(names: Sequence[str]) -> None:
    """Check that all devices are cores of this machine and that no two of them overlap."""
    check_core_sets(names)
    for name in names:
        cores_of(name)


def cores_of(name: str) -> tuple[int, ...]:
    """Return the cores of a device named ``core:0``, ``core:0-3`` or ``core:0+2-3``, in order."""
    runs = core_runs(name)
    allowed = sorted(os.sched_getaffinity(0))
    cores = [core for core in allowed if any(low <= core <= high for low, high in runs)]
    if not is_core(name) or len(cores) != sum(high - low + 1 for low, high in runs):
        raise UnavailableError(
            f"there is no device {name}: this process may run on cores "
            f"{', '.join(map(str, allowed))}"
        )
    return tuple(cores)


def current_core() -> int:
    """Return the core that this thread runs on now; it may be moved at any time."""
    return int(_SCHED_GETCPU())


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """Let all threads of this process run on these cores only."""
    allowed = os.sched_getaffinity(0)
    if allowed == set(cores):
        yield
        return
    before = _cores_of_threads()
    _pin(dict.fromkeys(before, cores))
    try:
        yield
    finally:
        _pin({thread: before.get(thread, allowed) for thread in _threads()})


def _threads() -> list[int]:
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]


def _cores_of_threads() -> dict[int, Collection[int]]:
    cores: dict[int, Collection[int]] = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended
            cores[thread] = os.sched_getaffinity(thread)
    return cores


def _pin(cores_of_threads: Mapping[int, Collection[int]]) -> None:
    for thread, cores in cores_of_threads.items():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)


def is_core(name: str) -> bool:
    """Return whether a device is a set of pinned cores, run by workers instead of by torch."""
    return name.partition(":")[0] == "core"


def is_local_core_set(name: str) -> bool:
    """Return whether a device is a set of cores that this process may run on."""
    return is_core(name) and is_here(name)


def is_here(name: str) -> bool:
    """Return whether a device is on this machine and usable by this process."""
    return not missing_reason(name)


def missing_reason(name: str) -> str:
    """Return the reason a device cannot be used on this machine, or ""."""
    try:
        device_kind(name)
    except ValueError as error:
        return str(error)
    return ""


def cores_in_use(names: Iterable[str]) -> list[int]:
    """Return the cores of the core sets among these devices, or else all physical cores."""
    return [core for name in names if is_core(name) for core in cores_of(name)] or physical_cores()


def shifted(names: Sequence[str], steps: int) -> tuple[str, ...]:
    """Return device names with numbers ``steps`` times the span of ``names`` higher.

    >>> shifted(("cuda:0", "cuda:1", "cpu"), 1)
    ('cuda:2', 'cuda:3', 'cpu')
    """
    cores = [core for name in names if is_core(name) for core in cores_of(name)]
    span = max(cores) - min(cores) + 1 if cores else 0
    indices = [int(name.rpartition(":")[2]) for name in names if _is_numbered(name)]
    width = max(indices) - min(indices) + 1 if indices else 0

    def shift(name: str) -> str:
        if is_core(name):
            return core_set(core + steps * span for core in cores_of(name))
        if not _is_numbered(name):
            return name
        backend, _, index = name.rpartition(":")
        return f"{backend}:{int(index) + steps * width}"

    return tuple(map(shift, names))


def _is_numbered(name: str) -> bool:
    return not is_core(name) and name.rpartition(":")[2].isdecimal() and ":" in name


def core_set(cores: Iterable[int]) -> str:
    """Return the device name of a set of cores, such as ``core:0-3`` or ``core:0+2``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return "core:" + "+".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def device_kind(name: str) -> str:
    """Return the kind of a device of this machine."""
    if is_core(name):
        return kind_of(len(cores_of(name)))
    from envs.hardware import torch_devices  # importing torch is not needed for cores

    return torch_devices.kind_of(torch_devices.torch_device(name))


def kind_of(core_count: int) -> str:
    """Return the device kind of a core set; sets of equal size share their op costs."""
    return "core" if core_count == 1 else f"core*{core_count}"


def available_memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory of this machine, or of its control group (version 2) if that is less.

    Inactive file pages count as free, as they do in MemAvailable.
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


_LOCAL: Final = re.compile(r"(?:(?P<host>.+):)?(?P<local>cpu|[a-z]\w*:[\d+-]+)")
_NUMBERED: Final = re.compile(r"(?:(?P<host>.+):)?[^:]*?(?P<number>\d+)")


def split_name(name: str) -> tuple[str, str]:
    """Split a device name into its host ("" if none) and its local torch device name.

    A device with only a number is a CUDA device; a name without a number is kept.

    >>> split_name("n1:g3"), split_name("n1:core:0-3"), split_name("cuda:2")
    (('n1', 'cuda:3'), ('n1', 'core:0-3'), ('', 'cuda:2'))
    """
    if match := _LOCAL.fullmatch(name):
        return match["host"] or "", match["local"]
    if match := _NUMBERED.fullmatch(name):
        return match["host"] or "", f"cuda:{int(match['number'])}"
    host, _, local = name.rpartition(":")
    return host, local


def hosts_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts of the devices, in order, without repeats."""
    return tuple(dict.fromkeys(split_name(name)[0] for name in names))
