"""Calibration of collectives: all-reduces between ranks that are pinned to cores of this machine.

They are run as in training, by :class:`placer.parallel.GradSync`, so the division by the number of
ranks counts, too. Hierarchical ones are measured for the levels that a plan has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from envs.collectives import MeasuredAllReduce
from envs.hardware.cache_folder import cache_folder, host, processor
from envs.hardware.discover import cores_of
from envs.hardware.noise import noise_of
from envs.measurement import CONTENDED
from graphs.files import write_whole
from graphs.strict_json import array, fields, load_checked, number, text, whole
from placer.parallel.grad_sync import GradSync
from placer.parallel.local_ranks import LocalRanks
from placer.parallel.methods.reductions import AllReduce, Hierarchical

FORMAT: Final = "placer-collectives/1"
PREFIX: Final = "collectives-"
BACKEND: Final = "gloo"
SIZES: Final = (64 << 10, 1 << 20, 16 << 20)
REPEATS: Final = 9
WARM_UP: Final = 2
READINGS: Final = 3
PAUSE_S: Final = 0.5
"""Number of readings of the noise of cores, and the time between them."""


def rank_counts(most: int) -> list[int]:
    """Return the numbers of ranks to measure: powers of two and the largest.

    >>> rank_counts(6)
    [2, 4, 6]
    """
    return sorted({*(1 << k for k in range(1, most.bit_length()) if 1 << k < most), most} - {0, 1})


def core_collectives(
    devices: Sequence[str], levels: Collection[tuple[int, ...]] = (), *, fresh: bool = False
) -> MeasuredAllReduce:
    """Return the all-reduces between ranks on these cores, from the cache or measured now.

    Hierarchical ones are measured for these ``levels``: ranks at each, innermost first. ``fresh``
    ignores the cache. Measurements are not kept where other processes used the cores.

    Raises:
        RankError: the ranks cannot be started.
    """
    path = _path(devices)
    known = None if fresh else _load(path)
    found = {each[0] for each in known.by_level} if known is not None else set()
    missing = sorted(set(levels) - found)
    if known is not None and not missing:
        return known
    cores = [cores_of(name) for name in devices]
    measured = known or measure(cores)
    if missing:
        by_level = sorted([*measured.by_level, *measure_levels(cores, missing)])
        measured = replace(measured, by_level=tuple(by_level))
    if not contended(sorted({core for each in cores for core in each})):
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps(_to_dict(measured), indent=1) + "\n")
    return measured


def measure(
    cores: Sequence[Sequence[int]], sizes: Sequence[int] = SIZES, repeats: int = REPEATS
) -> MeasuredAllReduce:
    """Time all-reduces of some sizes between the first 2, 4, ... of these ranks.

    Other load only adds time, so the lower quartile counts.
    """
    times = []
    for count in rank_counts(len(cores)):
        for size_bytes, seconds in _times(cores[:count], (), sizes, repeats):
            times.append((count, size_bytes, seconds))
    return MeasuredAllReduce(BACKEND, tuple(times))


def measure_levels(
    cores: Sequence[Sequence[int]],
    levels: Collection[tuple[int, ...]],
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
) -> list[tuple[tuple[int, ...], int, float]]:
    """Time hierarchical all-reduces of some sizes between the first of these ranks."""
    return [
        (each, size_bytes, seconds)
        for each in levels
        for size_bytes, seconds in _times(cores[: math.prod(each)], each, sizes, repeats)
    ]


def _times(
    cores: Sequence[Sequence[int]],
    levels: tuple[int, ...],
    sizes: Sequence[int],
    repeats: int,
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of all-reduces between ranks, by these levels if there are any."""
    with LocalRanks(cores, _handler) as ranks:
        return [
            (size, statistics.quantiles(ranks.ask((levels, size, repeats))[0], n=4)[0])
            for size in sizes
        ]


def contended(cores: Sequence[int]) -> bool:
    """Return whether other processes use any of these cores, for longer than ranks take to end."""
    for reading in range(READINGS):
        if reading:
            time.sleep(PAUSE_S)
        if all(noise_of(core).contention <= CONTENDED for core in cores):
            return False
    return True


def _handler() -> Callable[[tuple[tuple[int, ...], int, int]], list[float]]:
    return lambda request: reduction_times_s(*request)


def reduction_times_s(levels: tuple[int, ...], size_bytes: int, repeats: int) -> list[float]:
    """Time the reductions of one bucket on this rank, by these levels if there are any."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(size_bytes // 4))
    gradients = GradSync(
        module, reduction=partial(Hierarchical, levels=levels) if levels else AllReduce
    )
    seconds = []
    for _ in range(WARM_UP + repeats):
        gradients.zero_grad()
        began = time.perf_counter()
        gradients.finish()
        seconds.append(time.perf_counter() - began)
    gradients.close()
    return seconds[WARM_UP:]


def _path(devices: Sequence[str]) -> Path:
    key = "\n".join([host(), processor(), torch.__version__, BACKEND, *devices])
    return cache_folder() / f"{PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


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
