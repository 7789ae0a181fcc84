"""Evaluations per second of the simulator, and against a plain one over networkx and heapq.

    python -m benchmarks.simulator

One core. Random layered graphs of about two inputs per op; blocks of eight ops are placed at
random, so that most edges cross devices. Links are shared ("egress"), memory is on. The plain
simulator is the specification in tests/simulator_twin.py; both give the same step here, or the
benchmark fails. Compiling is not counted, but printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simulator_twin import twin_step

REPEATS = 9
BLOCK = 8


def layered(count: int, width: int, seed: int) -> nx.DiGraph[str]:
    rng = np.random.default_rng(seed)
    graph = new_graph(f"layered-{count}")
    for i in range(count):
        add_op(
            graph,
            f"op{i}",
            cost_s={"*": float(rng.lognormal(-9.0, 0.5))},
            output_bytes=int(rng.integers(1, 1 << 20)),
            parameter_bytes=1000,
        )
        if i >= width:
            inputs = rng.integers(max(0, i - 2 * width), i - width // 2, size=2)
            for u in sorted(set(inputs.tolist())):
                add_edge(graph, f"op{u}", f"op{i}")
    return graph


def cluster_of(count: int) -> Cluster:
    names = tuple(f"gpu{k}" for k in range(count))
    link = Link(between=names, latency_s=15e-6, bandwidth_bytes_per_s=10e9, sharing="egress")
    devices = (Device(name=name, kind="gpu", memory_bytes=10**10, launch_s=5e-6) for name in names)
    return Cluster(name=f"{count} devices", devices=tuple(devices), links=(link,))


def seconds(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Sorted wall times of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)


def report(name: str, times: list[float], batch: int, ops: int) -> None:
    middle, least, most = statistics.median(times), times[0], times[-1]
    print(
        f"  {name:34} {batch / middle:>10,.0f} /s   {middle / batch / ops * 1e9:6.0f} ns per op   "
        f"({batch / most:,.0f} to {batch / least:,.0f} /s)"
    )


def measure(ops: int, device_count: int, batch: int) -> None:
    graph, cluster = layered(ops, 12, seed=0), cluster_of(device_count)
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, device_count, (batch, ops // BLOCK + 1))
    devices = blocks.repeat(BLOCK, axis=1)[:, :ops].astype(np.int32)
    fresh = rng.random((batch, ops))
    same = np.tile(fresh[0], (batch, 1))
    simulator, without = Simulator(problem), Simulator(problem, memory=False)
    print(f"{ops} ops, {problem.graph.edge_count} edges, {device_count} devices")
    first = seconds(lambda: simulator.step_ns(devices[:1], same[:1]), repeats=1)
    print(f"  first evaluation, compiled or loaded: {first[0]:.2f} s")

    def run(simulator: Simulator, priority: NDArray[np.float64]) -> Callable[[], object]:
        return lambda: simulator.step_ns(devices, priority)

    times = seconds(run(simulator, same))
    report("same priorities", times, batch, ops)
    report("other priorities each time", seconds(run(simulator, fresh)), batch, ops)
    report("same priorities, memory not counted", seconds(run(without, same)), batch, ops)

    where, priority = devices[0].tolist(), same[0].tolist()
    if twin_step(graph, cluster, where, priority).step_ns != simulator.step_ns(devices, same)[0]:
        raise AssertionError("the plain simulator gives another step")
    plain = seconds(lambda: twin_step(graph, cluster, where, priority), repeats=3)
    report("plain, heapq and networkx", plain, 1, ops)
    ratio = statistics.median(plain) / (statistics.median(times) / batch)
    print(f"  the plain one takes {ratio:,.0f} times as long")


def main() -> None:
    measure(200, 4, batch=2000)
    measure(1000, 8, batch=300)


if __name__ == "__main__":
    main()
