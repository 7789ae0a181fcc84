"""Calibration of collectives: all-reduces between ranks on cores or GPUs of this machine.

They are run as in training, by :class:`placer.parallel.GradSync`, so the division by the number of
ranks counts, too. Hierarchical ones are measured for the levels that a plan has. Ranks on cores are
pinned to them and use gloo; a rank on a GPU sees no other one and uses NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from envs.collectives import MeasuredAllReduce
from envs.costs.torch_speeds import burst
from envs.hardware.cache_folder import cache_folder, host, processor
from envs.hardware.discover import cores_of, is_core
from envs.hardware.noise import noise_of
from envs.hardware.torch_devices import CPU, gpu_identities, torch_device, uuid_of
from envs.measurement import CONTENDED
from graphs.files import write_whole
from graphs.strict_json import array, fields, load_checked, number, text, whole
from placer.parallel.grad_sync import GradSync
from placer.parallel.local_ranks import LocalRanks, Seat
from placer.parallel.methods.reductions import AllReduce, Hierarchical

FORMAT: Final = "placer-collectives/1"
PREFIX: Final = "collectives-"
SIZES: Final = (64 << 10, 1 << 20, 16 << 20)
REPEATS: Final = 9
WARM_UP: Final = 2
LIMIT_S: Final = 120.0
"""Limit on the start of ranks, and on all reductions of one size."""
READINGS: Final = 3
PAUSE_S: Final = 0.5
"""Number of readings of the noise of cores, and the time between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Describes how ranks on devices of one kind are started, and what reduces between them."""

    name: str
    backend: str  # of the process group, as in ``placer.run``
    device: str  # where gradients are
    sizes: tuple[int, ...] = SIZES
    forked: bool = True
    limit_s: float = LIMIT_S


GLOO: Final = Transport(name="gloo", backend="gloo", device="cpu")
NCCL: Final = Transport(
    name="nccl",
    backend="cpu:gloo,cuda:nccl",
    device="cuda:0",
    sizes=(*SIZES, 64 << 20),
    forked=False,
)


def transport_of(devices: Sequence[str]) -> Transport:
    """Return what reduces between ranks on these devices: all cores, or all GPUs."""
    return GLOO if all(map(is_core, devices)) else NCCL


def seat_of(*devices: str) -> Seat:
    """Return the seat of a rank on sets of cores, or on GPUs and maybe the CPU."""
    if all(map(is_core, devices)):
        return Seat(cores=tuple(core for name in devices for core in cores_of(name)))
    gpus = {torch_device(name) for name in devices} - {CPU}
    uuids = [uuid_of(gpu) for gpu in sorted(gpus, key=lambda gpu: gpu.index)]
    return Seat(gpus=tuple(f"GPU-{uuid.removeprefix('GPU-')}" for uuid in uuids))


def rank_counts(most: int) -> list[int]:
    """Return the numbers of ranks to measure: powers of two and the largest.

    >>> rank_counts(6)
    [2, 4, 6]
    """
    return sorted({*(1 << k for k in range(1, most.bit_length()) if 1 << k < most), most} - {0, 1})


def known_collectives(
    devices: Sequence[str], levels: Collection[tuple[int, ...]] = (), *, fresh: bool = False
) -> MeasuredAllReduce:
    """Return the all-reduces between ranks on these devices, from the cache or measured now.

    Devices are all sets of cores, or all GPUs, of this machine. Hierarchical reductions are
    measured for these ``levels``: ranks at each, innermost first. ``fresh`` ignores the cache.
    Measurements are not kept where other processes used the cores.

    Raises:
        RankError: the ranks cannot be started, or one failed or took too long.
    """
    path = _path(devices)
    known = None if fresh else _load(path)
    found = {each[0] for each in known.by_level} if known is not None else set()
    missing = sorted(set(levels) - found)
    if known is not None and not missing:
        return known
    transport, seats = transport_of(devices), [seat_of(name) for name in devices]
    measured = known or measure(transport, seats)
    if missing:
        by_level = sorted([*measured.by_level, *measure_levels(transport, seats, missing)])
        measured = replace(measured, by_level=tuple(by_level))
    if not contended(sorted({core for seat in seats for core in seat.cores})):
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps(_to_dict(measured), indent=1) + "\n")
    return measured


def measure(
    transport: Transport, seats: Sequence[Seat], repeats: int = REPEATS
) -> MeasuredAllReduce:
    """Time all-reduces between the first 2, 4, ... ranks on these seats.

    Other load only adds time, so the lower quartile counts.
    """
    times = []
    for count in rank_counts(len(seats)):
        for size_bytes, seconds in reduction_s(transport, seats[:count], repeats=repeats):
            times.append((count, size_bytes, seconds))
    return MeasuredAllReduce(transport.name, tuple(times))


def measure_levels(
    transport: Transport,
    seats: Sequence[Seat],
    levels: Collection[tuple[int, ...]],
    repeats: int = REPEATS,
) -> list[tuple[tuple[int, ...], int, float]]:
    """Time hierarchical all-reduces between the first ranks on these seats."""
    return [
        (each, size_bytes, seconds)
        for each in levels
        for size_bytes, seconds in reduction_s(
            transport, seats[: math.prod(each)], each, repeats=repeats
        )
    ]


def reduction_s(
    transport: Transport,
    seats: Sequence[Seat],
    levels: tuple[int, ...] = (),
    *,
    repeats: int = REPEATS,
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of all-reduces between ranks, by these levels if there are any."""
    limit_s = transport.limit_s
    with LocalRanks(
        seats, _handler, backend=transport.backend, forked=transport.forked, timeout_s=limit_s
    ) as ranks:
        times_s = {
            size: ranks.ask((transport.device, levels, size, repeats), limit_s)[0]
            for size in transport.sizes
        }
    return [(size, statistics.quantiles(each, n=4)[0]) for size, each in times_s.items()]


def contended(cores: Sequence[int]) -> bool:
    """Return whether other processes use any of these cores, for longer than ranks take to end."""
    for reading in range(READINGS):
        if reading:
            time.sleep(PAUSE_S)
        if all(noise_of(core).contention <= CONTENDED for core in cores):
            return False
    return True


def _handler() -> Callable[[tuple[str, tuple[int, ...], int, int]], list[float]]:
    return lambda request: reduction_times_s(*request)


def reduction_times_s(
    device: str, levels: tuple[int, ...], size_bytes: int, repeats: int
) -> list[float]:
    """Time the reductions of one bucket on this rank, by these levels if there are any.

    On a GPU the launch of the first kernel counts, too.
    """
    module, target = nn.Module(), torch.device(device)
    module.weight = nn.Parameter(torch.zeros(size_bytes // 4, device=target))
    gradients = GradSync(
        module, reduction=partial(Hierarchical, levels=levels) if levels else AllReduce
    )
    seconds = []
    for _ in range(WARM_UP + repeats):
        gradients.zero_grad()
        seconds.append(burst(gradients.finish, [target], 1))
    gradients.close()
    return seconds[WARM_UP:]


def _path(devices: Sequence[str]) -> Path:
    transport = transport_of(devices)
    key = [host(), processor(), torch.__version__, transport.name, *devices]
    if transport is NCCL:
        key += gpu_identities(devices)
        key += sorted(f"{name}={each}" for name, each in os.environ.items() if "NCCL" in name)
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    return cache_folder() / f"{PREFIX}{digest}.json"


def _to_dict(measured: MeasuredAllReduce) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "backend": measured.backend,
        "times": [list(one) for one in measured.times],
        "by_level": [[list(levels), *rest] for levels, *rest in measured.by_level],
    }


def _load(path: Path) -> MeasuredAllReduce | None:
    """Return what a file holds, or None if it is missing or no such file."""
    with contextlib.suppress(OSError, ValueError):
        return load_checked(path, _from_dict)
    return None


def _from_dict(data: object) -> MeasuredAllReduce:
    required = frozenset({"format", "backend", "times"})
    top = fields(data, "", required | {"by_level"}, required=required)
    if top["format"] != FORMAT:
        raise ValueError(f"format is {top['format']!r}, not {FORMAT!r}")
    rows = (array(row, "times") for row in array(top["times"], "times"))
    times = (
        (whole(ranks, "times"), whole(size_bytes, "times"), number(seconds, "times"))
        for ranks, size_bytes, seconds in rows
    )
    rows = (array(row, "by_level") for row in array(top.get("by_level", []), "by_level"))
    by_level = (
        (
            tuple(whole(ranks, "by_level") for ranks in array(levels, "by_level")),
            whole(size_bytes, "by_level"),
            number(seconds, "by_level"),
        )
        for levels, size_bytes, seconds in rows
    )
    return MeasuredAllReduce(text(top["backend"], "backend"), tuple(times), tuple(by_level))
