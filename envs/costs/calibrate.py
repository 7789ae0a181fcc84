"""Calibration by measurement: speeds of devices, latency and bandwidth of links.

Each machine, torch version and list of devices has one cache file. This module times cores,
:mod:`envs.costs.torch_speeds` times torch devices. Everything is timed by the executor that will
run the placement, with programs of the same form, so the numbers include the overheads of hand-offs
and dispatch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from envs.costs.torch_speeds import LinkSpeed, measured_speeds, with_speeds
from envs.executors.cores.errors import once_more
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.pool import StepRun, WorkerPool
from envs.hardware.cache_folder import cache_folder, host, processor
from envs.hardware.cluster import Cluster, Device, cluster_to_toml, load_cluster
from envs.hardware.torch_devices import driver_version, kernel_settings, torch_device, uuid_of
from envs.measurement import CONTENDED, contention_warning
from graphs.extract.program import Call, Ref, Source, StepProgram, Value
from graphs.files import write_whole

WARM_UP: Final = 2
HOPS: Final = 40
SMALL_BYTES: Final = 64
LARGE_BYTES: Final = 2 << 20  # a large activation of a convolutional network
STREAM_BYTES: Final = 96 << 20  # more than the caches of one core
MATRIX: Final = 768
REPEATS: Final = 7
HAND_OFF_REPEATS: Final = 25
KEPT_IF: Final = "quiet"
"""Part of the cache key: files stored before measurements had to be quiet do not count."""
PINNED_LINKS: Final = "pinned links"
"""Part of the cache key: files stored before these copies were timed do not count."""
BUSY_KEPT_S: Final = 3600.0
"""Validity of cached speeds that were measured while other processes used the cores."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Speeds of devices of this machine that run together: in a cache file, or measured now.

    ``prefix`` and ``key`` name the file, together with the machine and torch's version.
    """

    devices: Cluster  # without speeds and links
    prefix: str
    key: Sequence[str]
    measure: Callable[[Cluster], Cluster]

    @property
    def path(self) -> Path:
        """The cache file."""
        here = [host(), processor(), torch.__version__]
        key = hashlib.sha256("\n".join([*here, *self.key]).encode()).hexdigest()[:16]
        return cache_folder() / f"{self.prefix}-{key}.toml"

    def known(self) -> Cluster | None:
        """Return the stored cluster, or None if it is missing, incomplete, or busy and old."""
        try:
            known = load_cluster(self.path)
            age_s = time.time() - self.path.stat().st_mtime
        except (OSError, ValueError):
            return None
        pairs = itertools.permutations(self.devices.names, 2)
        same = known.names == self.devices.names
        if contention_warning(known) and age_s > BUSY_KEPT_S:
            return None
        return known if same and all(known.link_between(*pair) for pair in pairs) else None

    def measured(self) -> Cluster:
        """Measure the cluster and store it; a cache that cannot be written is not an error."""
        measured = self.measure(self.devices)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.path, cluster_to_toml(measured))
        return measured


def core_calibration(devices: Cluster) -> Calibration:
    """Return the calibration of pinned cores."""
    key = (*devices.names, KEPT_IF)
    return Calibration(devices, "cores", key, lambda plain: once_more(lambda: calibrate(plain)))


def torch_calibration(devices: Cluster) -> Calibration:
    """Return the calibration of torch devices: of these GPUs, whatever their numbers."""
    kinds = [device.kind for device in devices.devices]
    uuids = [uuid_of(torch_device(name)) for name in devices.names]
    key = (*devices.names, *kinds, *uuids, *kernel_settings(), driver_version(), PINNED_LINKS)
    return Calibration(devices, "torch", key, measured_speeds)


def filled(cluster: Cluster, measured: Cluster) -> Cluster:
    """Return the cluster with missing values taken from ``measured``."""
    return replace(
        cluster,
        devices=tuple(map(_filled, cluster.devices, measured.devices)),
        links=cluster.links or measured.links,
    )


def _filled(device: Device, measured: Device) -> Device:
    contention = max(device.contention, measured.contention)
    lacking: dict[str, Any] = {
        name: getattr(measured, name)
        for name in ("peak_flop_per_s", "bandwidth_bytes_per_s")
        if math.isnan(getattr(device, name))
    }
    if not device.launch_s and measured.launch_s:
        lacking["launch_s"] = measured.launch_s
    if not lacking:
        return device
    source = "; ".join(text for text in (device.source, measured.source) if text)
    return replace(device, source=source, contention=contention, **lacking)


def calibrate(cluster: Cluster) -> Cluster:
    """Measure the speeds of all devices and links now, and return the cluster with them.

    The first pair of each two kinds is measured, both for the link and for the speeds of its
    devices. Of several measurements of one kind of device the last counts.
    """
    rates: dict[str, dict[str, float]] = {}  # by kind
    contention: dict[str, float] = {}  # by name
    hand_offs: dict[tuple[str, str], LinkSpeed] = {}
    pairs = list(itertools.combinations(cluster.devices, 2))
    every: Sequence[tuple[Device, ...]] = pairs or [cluster.devices]
    for pair in every:
        kinds = tuple(device.kind for device in pair)
        if kinds in hand_offs:
            continue
        with WorkerPool(_PROGRAM, pair) as pool:
            for number, device in enumerate(pair):
                rates[device.kind], contention[device.name] = _device_rates(pool, number)
            if len(kinds) == 2:
                slower = min(rates[kind]["bandwidth_bytes_per_s"] for kind in kinds)
                hand_offs[kinds[0], kinds[1]] = _hand_off(pool, slower)
    devices = tuple(
        replace(
            device,
            contention=ratio if (ratio := contention.get(device.name, 0.0)) > CONTENDED else 0.0,
        )
        for device in cluster.devices
    )
    links = {(a.name, b.name): hand_offs[a.kind, b.kind] for a, b in pairs}
    return with_speeds(replace(cluster, devices=devices), rates, links)


def _device_rates(pool: WorkerPool, device: int) -> tuple[dict[str, float], float]:
    """Return the rates of a device and its contention, the ratio of wall to CPU time.

    Matrix products show arithmetic, an addition larger than caches memory traffic. On several cores
    ops are timed by the wall clock, which does not show contention.
    """
    multiply, add = (
        _runs(pool, chain, [device] * len(chain), REPEATS) for chain in (_MULTIPLY, _ADD)
    )
    cpu_s = sum(float(run.cpu_s[device].sum()) for run in (*multiply, *add))
    rates = {
        "peak_flop_per_s": 2 * MATRIX**3 / _op_s(multiply, device),
        "bandwidth_bytes_per_s": 2 * STREAM_BYTES / _op_s(add, device),
    }
    return rates, sum(run.wall_s for run in (*multiply, *add)) / cpu_s


def _hand_off(pool: WorkerPool, memory_bytes_per_s: float) -> LinkSpeed:
    """Return the speed of hand-offs between two devices, from a ping-pong of tensors.

    A hop costs the additional time of the chain on two devices over one: the copy into shared
    memory, the signal, waking up, and reading what another core wrote. Other load only adds time,
    so the lowest decile of many runs counts, not the median.
    """
    hop_s = []
    for chain in (_SMALL, _LARGE):
        alone_s = _wall_s(pool, chain, [0] * len(chain))
        turns_s = _wall_s(pool, chain, [i % 2 for i in range(len(chain))])
        hop_s.append((turns_s - alone_s) / (len(chain) - 1))
    small_s, large_s = hop_s
    return LinkSpeed.of(small_s, large_s, LARGE_BYTES - SMALL_BYTES, memory_bytes_per_s)


def _op_s(runs: Sequence[StepRun], device: int) -> float:
    """Return the CPU seconds of an op: the median over a chain of the medians over its runs."""
    return float(np.median(np.median(np.stack([run.cpu_s[device] for run in runs]), axis=0)))


def _wall_s(pool: WorkerPool, chain: range, placed: Sequence[int]) -> float:
    runs = _runs(pool, chain, placed, HAND_OFF_REPEATS)
    return float(np.quantile([run.wall_s for run in runs], 0.1))


def _runs(pool: WorkerPool, chain: range, placed: Sequence[int], repeats: int) -> list[StepRun]:
    """Run one chain of the calibration program, its i-th op on device ``placed[i]``."""
    devices = [0] * _PROGRAM.op_count
    devices[chain.start : chain.stop] = placed
    number = pool.load(device_lists(_PROGRAM, devices, chain, len(pool.devices)))
    return [pool.run(number, each=True) for _ in range(WARM_UP + repeats)][WARM_UP:]


class _Chains:
    """Builds the calibration program: independent chains, in which each op reads the one before."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.sources: list[Source] = []

    def add(self, target: str, shape: tuple[int, ...], length: int, *, inputs: int) -> range:
        """Append a chain; every op reads the previous output ``inputs`` times."""
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        first = len(self.values)
        self.sources.append(Source(first, "input", str(len(self.sources))))
        start = len(self.calls)
        for i in range(length):
            self.calls.append(
                Call(
                    op=start + i,
                    target=target,
                    args=(Ref(first + i),) * inputs,
                    kwargs={},
                    outputs=(first + i + 1,),
                    tuple_result=False,
                    reads=(first + i,),
                )
            )
        self.values += [Value(shape, stride, torch.float32, first + i) for i in range(length + 1)]
        return range(start, start + length)

    def program(self) -> StepProgram:
        return StepProgram(
            values=tuple(self.values),
            calls=tuple(self.calls),
            sources=tuple(self.sources),
            results=(),
            op_count=len(self.calls),
            training=False,
        )


_CHAINS = _Chains()
_MULTIPLY = _CHAINS.add("aten.mm.default", (MATRIX, MATRIX), 3, inputs=2)
_ADD = _CHAINS.add("aten.add.Tensor", (STREAM_BYTES // 4,), 3, inputs=2)
_SMALL = _CHAINS.add("aten.neg.default", (SMALL_BYTES // 4,), HOPS, inputs=1)
_LARGE = _CHAINS.add("aten.neg.default", (LARGE_BYTES // 4,), HOPS, inputs=1)
_PROGRAM = _CHAINS.program()
