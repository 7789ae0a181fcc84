"""Evaluations per second of the simulator, on random layered graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.flat import flat_graph
from graphs.graph import GraphArrays
from placer.bench.table import Table

REPEATS: Final = 9
BLOCK: Final = 8
WIDTH: Final = 12
SIZES: Final = ((100, 4, 4000), (1_000, 8, 400), (10_000, 8, 40))  # ops, devices, placements


def cluster_of(count: int) -> Cluster:
    """So many GPUs, each with one port for what it sends."""
    names = tuple(f"gpu{k}" for k in range(count))
    link = Link(between=names, latency_s=15e-6, bandwidth_bytes_per_s=10e9, sharing="egress")
    devices = (Device(name=name, kind="gpu", memory_bytes=10**10, launch_s=5e-6) for name in names)
    return Cluster(name=f"{count} devices", devices=tuple(devices), links=(link,))


def flat_layered(count: int, width: int, seed: int) -> GraphArrays:
    """A random graph of about two inputs per op, each of an op about ``width`` before it."""
    rng = np.random.default_rng(seed)
    reader = np.repeat(np.arange(width, count), 2)
    read = reader - rng.integers(width // 2, 2 * width, len(reader))
    edges = np.unique(np.column_stack([np.maximum(read, 0), reader]), axis=0)
    return flat_graph(
        f"layered-{count}",
        cost_s=rng.lognormal(-9.0, 0.5, count),
        source=edges[:, 0],
        target=edges[:, 1],
        output_bytes=rng.integers(1, 1 << 20, count),
        parameter_bytes=np.full(count, 1000),
    )


def placements(
    ops: int, device_count: int, batch: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Devices (batch, ops), random by blocks so that most edges cross, and equal priorities."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, device_count, (batch, ops // BLOCK + 1))
    devices = blocks.repeat(BLOCK, axis=1)[:, :ops].astype(np.int32)
    return devices, np.tile(rng.random(ops), (batch, 1))


def seconds(
    work: Callable[[], object],
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Sorted times of a few runs."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return sorted(times)


def evaluations_per_s(ops: int, device_count: int, batch: int) -> list[float]:
    """Of a batch of placements on one core, by the thread's CPU clock, several times."""
    problem = Problem.of(flat_layered(ops, WIDTH, seed=0), cluster_of(device_count))
    devices, same = placements(ops, device_count, batch)
    simulator = Simulator(problem)
    simulator.step_ns(devices[:1], same[:1])  # compiles
    times = seconds(lambda: simulator.step_ns(devices, same), clock=time.thread_time)
    return [batch / time_s for time_s in times]


def speed_table(found: dict[tuple[int, int], list[float]]) -> Table:
    """Of ``{(ops, devices): evaluations per second}``."""
    rows = []
    for (ops, devices), rates in found.items():
        middle, low, high = np.median(rates), min(rates), max(rates)
        rows.append((f"{ops:,}", f"{devices}", f"{middle:,.0f}", f"{low:,.0f} to {high:,.0f}"))
    return Table(
        "Simulator",
        "evaluations per second on one core, most edges crossing devices",
        ("ops", "devices", "median", "range"),
        tuple(rows),
    )
