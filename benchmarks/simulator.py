"""Evaluations per second of the simulator, compared with a plain one on networkx and heapq.

    python -m benchmarks.simulator

One core unless stated otherwise; rates by the thread's CPU clock, ratios by wall time. Random
layered graphs with about two inputs per op; blocks of eight ops are placed at random, so that most
edges cross devices. Links are shared ("egress"), memory is simulated, priorities are the same for
all placements. Memory "suffices" where everything that the ops of a device can need at once fits
into it; else it is "followed" over time. An event is the end of an op or of a transfer. The share
of the memory bandwidth is that of reading and writing all arrays once per evaluation, although the
fast path (see envs/simulator/express.py) skips those that only the slow path needs. The plain
simulator is benchmarks/heapq_simulator.py, the specification tests/simulator_twin.py; the benchmark
fails unless all return the same step time. Compile time is excluded, but printed.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from benchmarks.heapq_simulator import HeapqSimulator
from envs.problem import Problem
from envs.simulator import ProblemArrays, Simulator, Workspace
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.bench.speed import REPEATS, cluster_of, flat_layered, placements, seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simulator_twin import twin_step

ROWS = (  # ops, devices, placements in a batch, minimum evaluations per second
    (100, 4, 4000, 100_000),
    (200, 4, 2000, 40_000),
    (1_000, 8, 400, 10_000),
    (10_000, 8, 40, 900),
    (100_000, 8, 4, 60),
    (1_000_000, 64, 1, 2),
)
LARGEST_BYTES = 2 * 10**9
PARALLEL_BAR = 1.7
PLAIN_BAR = 50
COLD_BAR_S = 1.5
LARGEST = "largest"


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


def copy_bytes_per_s() -> float:
    """Return the bytes that one core reads and writes per second in an uncached copy."""
    source = np.zeros(1 << 27, np.uint8)
    target = np.zeros_like(source)
    return 2 * len(source) / seconds(lambda: np.copyto(target, source))[0]


def size_bytes(*tables: ProblemArrays | Workspace) -> int:
    return sum(array.nbytes for table in tables for array in table if isinstance(array, np.ndarray))


def measure(ops: int, device_count: int, batch: int, bar: int, copied_bytes_per_s: float) -> None:
    problem = Problem.of(flat_layered(ops, 12, seed=0), cluster_of(device_count))
    devices, same = placements(ops, device_count, batch)
    simulator = Simulator(problem)
    simulator.step_ns(devices[:1], same[:1])
    repeats = REPEATS if ops < 10**6 else 3
    times = seconds(lambda: simulator.step_ns(devices, same), repeats, time.thread_time)
    middle = statistics.median(times) / batch
    events = ops + len(simulator.run(devices[0], same[0]).transfers)
    touched = size_bytes(simulator.arrays, simulator.work)
    room = simulator.arrays.memory_bytes
    followed = (simulator.work.devices["most_bytes"] > room).any()
    print(
        f"  {ops:>9,} {device_count:>3} {1 / middle:>10,.1f} {batch / times[-1]:>10,.1f} "
        f"{batch / times[0]:>10,.1f} {bar:>8,} {middle / events * 1e9:>9.0f} "
        f"{touched / middle / copied_bytes_per_s:>8.0%}  {'followed' if followed else 'suffices'}"
    )


def measure_largest() -> None:
    """Run the last row; called in a separate process to measure its memory."""
    ops, device_count, batch, bar = ROWS[-1]
    measure(ops, device_count, batch, bar, copy_bytes_per_s())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"  its process needed {peak_bytes / 1e9:.2f} GB at most (bar: {LARGEST_BYTES / 1e9:g})")


def measure_modes() -> None:
    """Measure the cost of options and the gain of threads on 1,000 ops and 8 devices."""
    ops, device_count, batch = 1000, 8, 400
    problem = Problem.of(flat_layered(ops, 12, seed=0), cluster_of(device_count))
    devices, same = placements(ops, device_count, batch)
    fresh = np.random.default_rng(2).random(same.shape)
    plain, without = Simulator(problem), Simulator(problem, memory=False)
    both = Simulator(problem, threads=2)
    peak_bytes = max(
        int(plain.run(d, p).peak_bytes.max()) for d, p in zip(devices, same, strict=True)
    )
    twice, tight = (
        Simulator(replace(problem, memory_bytes=np.full(device_count, room)))
        for room in (2 * peak_bytes, peak_bytes)
    )
    in_order = cluster_of(device_count)
    by_priority = replace(in_order, links=(replace(in_order.links[0], order="priority"),))
    long_way = Simulator(Problem.of(problem.graph, by_priority))

    def rate(
        simulator: Simulator,
        priority: NDArray[np.float64],
        clock: Callable[[], float] = time.thread_time,
    ) -> float:
        times = seconds(lambda: simulator.step_ns(devices, priority), clock=clock)
        return batch / statistics.median(times)

    def wall_rate(simulator: Simulator) -> float:
        return rate(simulator, same, time.perf_counter)

    print(f"{ops:,} ops, {device_count} devices")
    print(f"  other priorities each time   {rate(plain, fresh):>8,.0f} /s")
    print(f"  memory not counted           {rate(without, same):>8,.0f} /s")
    print(f"  memory twice the peak        {rate(twice, same):>8,.0f} /s")
    print(f"  memory just enough           {rate(tight, same):>8,.0f} /s")
    print(f"  links by priority, long way  {rate(long_way, same):>8,.0f} /s")
    ratios = sorted(wall_rate(both) / wall_rate(plain) for _ in range(REPEATS))
    print(
        f"  two threads / one thread     {statistics.median(ratios):>8.2f}    "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}, bar: {PARALLEL_BAR})"
    )


def measure_plain() -> None:
    """Compare with the plain simulator and with the specification on one graph."""
    ops, device_count, batch = 200, 4, 2000
    graph, cluster = layered(ops, 12, seed=0), cluster_of(device_count)
    simulator = Simulator(Problem.of(GraphArrays.from_graph(graph), cluster))
    devices, same = placements(ops, device_count, batch)
    plain = HeapqSimulator(graph, cluster)
    steps = simulator.step_ns(devices, same).tolist()
    for k in range(20):
        if plain.step(devices[k].tolist(), same[k].tolist())[0] != steps[k]:
            raise AssertionError("the plain simulator gives another step")
    where, priority = devices[0].tolist(), same[0].tolist()
    if twin_step(graph, cluster, where, priority).step_ns != steps[0]:
        raise AssertionError("the specification gives another step")
    own = statistics.median(seconds(lambda: simulator.step_ns(devices, same))) / batch
    heap = statistics.median(seconds(lambda: plain.step(where, priority), 50))
    twin = statistics.median(seconds(lambda: twin_step(graph, cluster, where, priority), 3))
    print(f"{ops} ops, {device_count} devices: heapq and networkx do {1 / heap:,.0f} /s, ", end="")
    print(f"they take {heap / own:,.0f} times as long (bar: {PLAIN_BAR}); ", end="")
    print(f"the specification, which is to be read, {twin / own:,.0f} times")


def measure_cold() -> None:
    """Time a process that imports the simulator and evaluates once, with a warm compile cache."""
    code = (
        "import time; began = time.perf_counter()\n"
        "import sys\n"
        "from benchmarks import simulator as made\n"
        "problem = made.Problem.of(made.flat_layered(100, 12, 0), made.cluster_of(4))\n"
        "made.Simulator(problem).step_ns(*made.placements(100, 4, 1))\n"
        "print(time.perf_counter() - began, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    cold_s, torch_too = out.stdout.split()
    print(f"new process to first evaluation: {float(cold_s):.2f} s (bar: {COLD_BAR_S} s)", end="")
    print(", with torch" if torch_too == "True" else ", without torch")


def main() -> None:
    problem = Problem.of(flat_layered(100, 12, seed=0), cluster_of(4))
    devices, same = placements(100, 4, 1)
    first = seconds(lambda: Simulator(problem).step_ns(devices, same), repeats=1)
    print(f"first evaluation, compiled or loaded: {first[0]:.2f} s")
    print("        ops dev       /s        from         to   at least  ns/event bandwidth  memory")
    copied = copy_bytes_per_s()
    for ops, device_count, batch, bar in ROWS[:-1]:
        measure(ops, device_count, batch, bar, copied)
    command = [sys.executable, "-m", "benchmarks.simulator", LARGEST]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    measure_modes()
    measure_plain()
    measure_cold()


if __name__ == "__main__":
    if LARGEST in sys.argv[1:]:
        measure_largest()
    else:
        main()
