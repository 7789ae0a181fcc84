"""Measured speeds of torch devices and of the copies between them, and how speeds are described.

Asynchronous devices are timed over many calls in a row, synchronized once
(:func:`seconds_per_call`).
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from envs.executors.torch.watchdog import timed_within_bounds
from envs.hardware.cluster import Cluster, Link
from envs.hardware.torch_devices import CPU, matmul_precision, synchronize, torch_device

BURST_S: Final = 2e-3
MOST_CALLS: Final = 1000
REPEATS: Final = 5
MOST_QUEUED: Final = 50
"""Calls that are launched ahead: a CUDA device queues about 1000 kernels before launches wait."""
SLEEP_FACTORS: Final = (3, 20)
"""Sleep of a device as a multiple of the launches; the second where the first was too short."""
LEAST_SLEEP_S: Final = 2e-4
MOST_SLEEP_S: Final = 0.5
MOST_CYCLES_PER_S: Final = 2.5e9
"""Clock of a GPU at most, which counts its sleep."""
LEAST_CALL_S: Final = 1e-9


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

    A single CUDA device is timed by its events, which the idle device reaches at once: the time
    until its first kernel starts is included, as are gaps in which it waits for a launch; the final
    wait of this process is excluded.
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


class CallTime(NamedTuple):
    """Seconds of a call: that it occupies its device, and that its thread takes to launch it."""

    device_s: float
    launch_s: float  # nan if the device has no launches


def call_time(
    work: Callable[[], object], device: torch.device, *, repeats: int = REPEATS
) -> CallTime:
    """Return the median times of a call among others, see :func:`burst_time`.

    The first call is not counted, as in :func:`seconds_per_call`.
    """
    burst(work, [device], 1)
    count = calls_per_burst(burst(work, [device], 1))
    return burst_time(lambda: work, device, count, repeats=repeats)


def burst_time(
    prepared: Callable[[], Callable[[], object]],
    device: torch.device,
    count: int,
    *,
    repeats: int = REPEATS,
) -> CallTime:
    """Return the median times of a call in a burst of ``count``; each burst has its own work.

    A CUDA device sleeps until all are launched, and then runs them without gaps: so launches do not
    count on the device, and the launching thread never waits. Where that fails, as for a call that
    waits for the device, and on other devices, a call takes the longer of both times.
    """
    if device.type != "cuda":
        bursts = [burst(prepared(), [device], count) for _ in range(repeats)]
        return CallTime(float(np.median(bursts)) / count, math.nan)
    count = min(count, MOST_QUEUED)
    alone, _ = launched(prepared(), device, count)
    for factor in SLEEP_FACTORS if hasattr(torch.cuda, "_sleep") else ():
        asleep_s = min(factor * count * alone.launch_s + LEAST_SLEEP_S, MOST_SLEEP_S)
        bursts_ahead = []
        for _ in range(repeats):
            times, is_ahead = launched(prepared(), device, count, asleep_s)
            if not is_ahead:
                break
            bursts_ahead.append(times)
        else:
            return _medians(bursts_ahead)
    return _medians([launched(prepared(), device, count)[0] for _ in range(repeats)])


def _medians(times: Sequence[CallTime]) -> CallTime:
    """Return the median of each; no call takes no time."""
    return CallTime(
        *(max(float(np.median(each)), LEAST_CALL_S) for each in zip(*times, strict=True))
    )


def launched(
    work: Callable[[], object], device: torch.device, count: int, asleep_s: float = 0.0
) -> tuple[CallTime, bool]:
    """Return the times of each of ``count`` calls on a CUDA device that sleeps first.

    Also return whether it slept until all were launched. Without sleep the device waits for the
    launch of each.
    """
    event: Any = torch.cuda.Event  # untyped in torch
    synchronize(device)
    with torch.cuda.device(device):
        start, end = event(enable_timing=True), event(enable_timing=True)
        if asleep_s:
            torch.cuda._sleep(math.ceil(asleep_s * MOST_CYCLES_PER_S))  # type: ignore[no-untyped-call]  # untyped in torch
        start.record()
        began_s = time.perf_counter()
        for _ in range(count):
            work()
        launching_s = time.perf_counter() - began_s
        end.record()
        is_ahead = asleep_s > 0.0 and not start.query()
        end.synchronize()
    device_s = float(start.elapsed_time(end)) / 1e3
    return CallTime(device_s / count, launching_s / count), is_ahead


SHORTEST_S: Final = 1e-6
"""Lower bound on measured latencies."""
SMALL_BYTES: Final = 64
LARGE_BYTES: Final = 16 << 20
HOPS: Final = 40
STREAM_BYTES: Final = 96 << 20  # exceeds the caches
SHARED_BUS_RATIO: Final = 1.5
"""Copies share a bus if two at once take longer than this multiple of the time of one alone.

On buses of their own the multiple is 1, on a shared one it is 2.
"""
LONG_PRODUCT_S: Final = 2e-3
SMALLEST_MATRIX: Final = 256
LARGEST_MATRIX: Final = 8192


class LinkSpeed(NamedTuple):
    """Latency and bandwidth of transfers from one device to another."""

    latency_s: float
    bandwidth_bytes_per_s: float

    @classmethod
    def of(
        cls, small_s: float, large_s: float, more_bytes: int, fastest_bytes_per_s: float
    ) -> LinkSpeed:
        """Return the speed from the times of a small transfer and one of ``more_bytes`` more.

        Noise may make a time shorter than possible, even negative where times are subtracted, so
        the latency is at least 1 us and the bandwidth at most ``fastest_bytes_per_s``.

        >>> LinkSpeed.of(1e-5, 1e-5 + 8e-3, 32_000_000, 8e9)
        LinkSpeed(latency_s=1e-05, bandwidth_bytes_per_s=4000000000.0)
        """
        moving_s = max(large_s - small_s, more_bytes / fastest_bytes_per_s)
        return cls(max(small_s, SHORTEST_S), more_bytes / moving_s)


def with_speeds(
    cluster: Cluster,
    rates: Mapping[str, Mapping[str, Any]],
    links: Mapping[tuple[str, str], LinkSpeed],
    *,
    link_fields: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    one_way: bool = False,
    notes: str = "",
) -> Cluster:
    """Return the cluster with speeds measured today.

    ``rates`` are fields of devices by kind, ``links`` speeds by the names of both ends, and
    ``link_fields`` other fields of some links. With ``one_way`` each direction is a link.
    """
    pairs = itertools.permutations if one_way else itertools.combinations
    source = f"measured {datetime.date.today().isoformat()}, torch {torch.__version__}{notes}"
    return replace(
        cluster,
        devices=tuple(replace(d, source=source, **rates[d.kind]) for d in cluster.devices),
        links=tuple(
            Link(
                between=(a.name, b.name),
                one_way=one_way,
                **links[a.name, b.name]._asdict(),
                **({"sharing": "pair"} | dict((link_fields or {}).get((a.name, b.name), {}))),
            )
            for a, b in pairs(cluster.devices, 2)
        ),
    )


def measured_speeds(cluster: Cluster) -> Cluster:
    """Return the cluster with speeds, launch overheads and links measured now.

    Devices of one kind are measured once, links for each ordered pair of devices: GPUs of one kind
    may be joined by NVLink, a switch or two processors. Links are one-way, since copies from and to
    the host differ, as do copies with its page-locked memory. A device needs 0.3 GB of free memory.
    """
    first_of = {device.kind: torch_device(device.name) for device in reversed(cluster.devices)}
    rates = {kind: _rates(device) for kind, device in first_of.items()}
    copies: dict[tuple[str, str], LinkSpeed] = {}
    with_host: dict[tuple[str, str], dict[str, Any]] = {}
    for a, b in itertools.permutations(cluster.devices, 2):
        fastest = min(rates[device.kind]["bandwidth_bytes_per_s"] for device in (a, b))
        ends = torch_device(a.name), torch_device(b.name)
        with timed_within_bounds(f"copies from {a.name} to {b.name}", *ends):
            copies[a.name, b.name] = copy_speed(*ends, fastest)
            if {"cpu", "cuda"} == {end.type for end in ends}:
                pinned = copy_speed(*ends, fastest, pinned=True)
                with_host[a.name, b.name] = {
                    "pinned_bandwidth_bytes_per_s": pinned.bandwidth_bytes_per_s
                }
    for ends_of_link, bus in host_buses(list(with_host)).items():
        with_host[ends_of_link] |= {"sharing": "bus", "bus": bus}
    precision = f", float32 matmul precision {matmul_precision()}"
    return with_speeds(cluster, rates, copies, link_fields=with_host, one_way=True, notes=precision)


def launch_s(device: torch.device) -> float:
    """Return the seconds of an op with next to no work."""
    return seconds_per_call(partial(torch.neg, torch.ones(1).to(device)), [device])


def flop_per_s(device: torch.device) -> float:
    """Return the peak rate of float32 matrix products, in torch's current matmul precision."""
    size = SMALLEST_MATRIX
    while True:
        random = torch.Generator().manual_seed(0)  # products of ones take less power
        matrix = torch.rand(size, size, generator=random).to(device)
        product = partial(torch.mm, matrix, matrix)
        burst(product, [device], 1)
        if burst(product, [device], 1) > LONG_PRODUCT_S or size >= LARGEST_MATRIX:
            return 2 * size**3 / seconds_per_call(product, [device])
        size *= 2


def memory_bytes_per_s(device: torch.device) -> float:
    """Return the bytes read and written per second by an op whose data exceeds the caches."""
    source = torch.ones(STREAM_BYTES // 4).to(device)
    result = torch.empty_like(source)
    seconds = seconds_per_call(partial(torch.neg, source, out=result), [device])
    return 2 * STREAM_BYTES / seconds


def copy_speed(
    source: torch.device,
    destination: torch.device,
    fastest_bytes_per_s: float,
    *,
    pinned: bool = False,
) -> LinkSpeed:
    """Measure latency and bandwidth of copies into fresh memory, as placed modules make them.

    With ``pinned`` what is on the host is in page-locked memory and the copy is asynchronous, as
    copies are that overlap with ops. Between accelerators many small copies in a row only show how
    fast they are issued: their latency is that of :func:`hop_s`.
    """
    seconds = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        tensor = torch.ones(size // 4)
        tensor = tensor.pin_memory() if pinned and source == CPU else tensor.to(source)
        copy = partial(tensor.to, destination, non_blocking=pinned or destination != CPU)
        seconds.append(seconds_per_call(copy, [source, destination]))
    small_s, large_s = seconds
    speed = LinkSpeed.of(small_s, large_s, LARGE_BYTES - SMALL_BYTES, fastest_bytes_per_s)
    if pinned or CPU in (source, destination):
        return speed
    return speed._replace(latency_s=max(speed.latency_s, hop_s(source, destination)))


def host_buses(links: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the bus of those links between the host and GPUs that share one, by their ends.

    Copies in one direction share it where two at once take nearly as long as one after the other,
    as behind one switch.
    """
    bus_of = {ends: " -> ".join(ends) for ends in links}
    for pair in itertools.combinations(links, 2):
        one, other = pair
        same_way = (one[0] == "cpu") == (other[0] == "cpu")
        if same_way and bus_of[one] != bus_of[other] and _wait_for_each_other(pair):
            before = bus_of[other]
            bus_of |= {ends: bus_of[one] for ends, bus in bus_of.items() if bus == before}
    buses = list(bus_of.values())
    return {ends: bus for ends, bus in bus_of.items() if buses.count(bus) > 1}


def _wait_for_each_other(links: Sequence[tuple[str, str]]) -> bool:
    devices = [torch_device(name) for name in dict.fromkeys(itertools.chain(*links))]
    with timed_within_bounds("copies between the host and two GPUs at once", *devices):
        copies = []
        for source, destination in ([torch_device(name) for name in ends] for ends in links):
            tensor = torch.ones(LARGE_BYTES // 4)
            tensor = tensor.pin_memory() if source == CPU else tensor.to(source)
            copies.append(partial(tensor.to, destination, non_blocking=True))
        alone_s = max(seconds_per_call(copy, devices) for copy in copies)
        both_s = seconds_per_call(lambda: [copy() for copy in copies], devices)
    return both_s > SHARED_BUS_RATIO * alone_s


def hop_s(source: torch.device, destination: torch.device) -> float:
    """Return the seconds from the end of an op to the start of one on another device.

    They are the additional time of a chain of ops that alternates between both devices.
    """
    small = torch.ones(SMALL_BYTES // 4).to(source)

    def chain(devices: Sequence[torch.device]) -> None:
        tensor = small
        for device in devices:
            tensor = torch.neg(tensor.to(device, non_blocking=True))

    ends = [source, destination]
    alone_s = seconds_per_call(partial(chain, [source] * HOPS), ends)
    turns_s = seconds_per_call(partial(chain, [destination, source] * (HOPS // 2)), ends)
    return (turns_s - alone_s) / HOPS


def _rates(device: torch.device) -> dict[str, float]:
    with timed_within_bounds("launches, products and memory", device):
        return {
            "launch_s": launch_s(device),
            "peak_flop_per_s": flop_per_s(device),
            "bandwidth_bytes_per_s": memory_bytes_per_s(device),
        }
