"""Evaluations per second of the simulator, compared with a plain one on networkx and heapq.

    python -m benchmarks simulator

One core unless stated otherwise; rates by the thread's CPU clock, ratios by wall time. Random
layered graphs with about two inputs per op; blocks of eight ops are placed at random, so that most
edges cross devices. Links are shared ("egress"), memory is simulated, priorities are the same for
all placements. Compilation is not timed. ``plain`` fails unless both simulators return the same
step times.
"""

from __future__ import annotations

import heapq
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Effort, Part, seconds
from benchmarks.tables import Table
from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.host import Host
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays
from graphs.synthetic import sketches
from graphs.synthetic.flat import flat_graph
from graphs.synthetic.shapes import layered

REPEATS: Final = 9
BLOCK: Final = 8
WIDTH: Final = 12
SIZES: Final = (  # ops, devices, placements in a batch, minimum evaluations per second
    (100, 4, 4000, 100_000),
    (1_000, 8, 400, 10_000),
    (10_000, 8, 40, 900),
    (100_000, 8, 4, 60),
    (1_000_000, 64, 1, 2),
)
QUICK_SIZES: Final = 3
LARGEST_BYTES: Final = 2 * 10**9
PARALLEL_BAR: Final = 1.7
PLAIN_BAR: Final = 50
COLD_BAR_S: Final = 1.5
OP_ENDS, TRANSFER_ENDS = 0, 1
IN_OWN_PROCESS: Final = """
import json, resource, time
began = time.perf_counter()
import sys
from benchmarks import simulator
ops, devices, batch, repeats = json.loads(sys.argv[1])
rates = simulator.evaluations_per_s(ops, devices, batch, repeats)
print(json.dumps({
    "evaluations_per_s": rates,
    "process_s": time.perf_counter() - began,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "with_torch": "torch" in sys.modules,
}))
"""


def cluster_of(count: int) -> Cluster:
    """Return ``count`` GPUs, each with one port for what it sends."""
    names = tuple(f"gpu{k}" for k in range(count))
    link = Link(between=names, latency_s=15e-6, bandwidth_bytes_per_s=10e9, sharing="egress")
    devices = (Device(name=name, kind="gpu", memory_bytes=10**10, launch_s=5e-6) for name in names)
    return Cluster(name=f"{count} devices", devices=tuple(devices), links=(link,))


def flat_layered(count: int, width: int, seed: int) -> GraphArrays:
    """Return a random graph of about two inputs per op, each of an op about ``width`` before it."""
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
    """Return devices (batch, ops), random by blocks so that most edges cross, equal priorities."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, device_count, (batch, ops // BLOCK + 1))
    devices = blocks.repeat(BLOCK, axis=1)[:, :ops].astype(np.int32)
    return devices, np.tile(rng.random(ops), (batch, 1))


@dataclass(slots=True)
class Lane:
    """State of one device: ready ops, running op, and the queue of its outgoing transfers."""

    used_bytes: int = 0
    peak_bytes: int = 0
    running: bool = False
    sending: bool = False
    ready: list[tuple[float, int, str]] = field(default_factory=list)
    queue: list[tuple[int, int, int, str]] = field(default_factory=list)

    def allocate(self, size: int) -> None:
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class PlainSimulator:
    """Plain simulator on heapq and networkx for clusters with one "egress" link.

    It returns the step time and peak memory of the compiled simulator if all devices share one
    full-duplex link with a queue per sender, and an op costs the same, not 0 s, on all devices.
    """

    def __init__(self, graph: nx.DiGraph[str], cluster: Cluster) -> None:
        self.graph, self.link = graph, cluster.links[0]
        self.device_count, self.launch_s = len(cluster), cluster.devices[0].launch_s
        self.index = {op: i for i, op in enumerate(graph)}
        backward = {op for op, node in graph.nodes.items() if node["phase"] == "backward"}
        self.held_bytes = {
            op: 0 if backward.intersection(graph.successors(op)) else node["saved_bytes"]
            for op, node in graph.nodes.items()
        }

    def step(self, devices: list[int], priority: list[float]) -> tuple[int, list[int]]:
        """Return the step time in nanoseconds and the peak bytes of each device."""
        self.where = dict(zip(self.graph, devices, strict=True))
        self.priority = dict(zip(self.graph, priority, strict=True))
        self.missing = dict(self.graph.in_degree())
        self.lanes = [Lane() for _ in range(self.device_count)]
        self.events: list[tuple[int, int, int, str, int]] = []
        self.sent: dict[tuple[str, int], tuple[int, list[str]]] = {}  # bytes, reading ops
        self.users: dict[tuple[str, int], int] = {}  # of each device's copy of an output
        for op, node in self.graph.nodes.items():
            lane = self.lanes[self.where[op]]
            for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
                lane.allocate(node[name])
            if not self.missing[op]:
                self._make_ready(op)
        now = 0
        while True:
            for d, lane in enumerate(self.lanes):
                self._start(d, lane, now)
            if not self.events:
                return now, [lane.peak_bytes for lane in self.lanes]
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, kind, op, to = heapq.heappop(self.events)
                if kind == OP_ENDS:
                    self._end_op(op, now)
                else:
                    self._end_transfer(op, to)

    def _make_ready(self, op: str) -> None:
        heapq.heappush(self.lanes[self.where[op]].ready, (-self.priority[op], self.index[op], op))

    def _start(self, d: int, lane: Lane, now: int) -> None:
        if not lane.running and lane.ready:
            _, number, op = heapq.heappop(lane.ready)
            node = self.graph.nodes[op]
            lane.running = True
            lane.allocate(node["output_bytes"] + node["workspace_bytes"] + self.held_bytes[op])
            end = now + round((node["cost_s"]["*"] + self.launch_s) * 1e9)
            heapq.heappush(self.events, (end, number, OP_ENDS, op, d))
        if not lane.sending and lane.queue:
            _, number, to, op = heapq.heappop(lane.queue)
            size, _ = self.sent[op, to]
            lane.sending = True
            self.lanes[to].allocate(size)
            seconds = self.link.latency_s + size / self.link.bandwidth_bytes_per_s
            heapq.heappush(self.events, (now + round(seconds * 1e9), number, TRANSFER_ENDS, op, to))

    def _end_op(self, op: str, now: int) -> None:
        d, node = self.where[op], self.graph.nodes[op]
        lane = self.lanes[d]
        lane.running = False
        lane.used_bytes -= node["workspace_bytes"]
        for u in self.graph.predecessors(op):
            self._release(u, d)
        readers: dict[int, list[str]] = {}
        for v in self.graph.successors(op):
            readers.setdefault(self.where[v], []).append(v)
        here = readers.pop(d, [])
        self.users[op, d] = len(here) + len(readers)
        self._arrive(here)
        for to, there in readers.items():
            size = max(self.graph.edges[op, v]["bytes"] for v in there)
            self.sent[op, to] = size, there
            self.users[op, to] = len(there)
            heapq.heappush(lane.queue, (now, self.index[op], to, op))

    def _end_transfer(self, op: str, to: int) -> None:
        self.lanes[self.where[op]].sending = False
        self._release(op, self.where[op])
        self._arrive(self.sent[op, to][1])

    def _arrive(self, readers: list[str]) -> None:
        for v in readers:
            self.missing[v] -= 1
            if not self.missing[v]:
                self._make_ready(v)

    def _release(self, op: str, d: int) -> None:
        self.users[op, d] -= 1
        if not self.users[op, d]:
            own = self.where[op] == d
            size = self.graph.nodes[op]["output_bytes"] if own else self.sent[op, d][0]
            self.lanes[d].used_bytes -= size


def evaluations_per_s(ops: int, device_count: int, batch: int, repeats: int) -> list[float]:
    """Return the evaluations per second of a batch of placements on one core, several times."""
    problem = Problem.of(flat_layered(ops, WIDTH, seed=0), cluster_of(device_count))
    devices, same = placements(ops, device_count, batch)
    simulator = Simulator(problem)
    simulator.step_ns(devices[:1], same[:1])  # compiles
    times = seconds(lambda: simulator.step_ns(devices, same), repeats, time.thread_time)
    return [batch / time_s for time_s in times]


def in_own_process(ops: int, device_count: int, batch: int, repeats: int) -> dict[str, Any]:
    """Return the rates of a new process, its seconds until then, and its peak memory."""
    asked = json.dumps([ops, device_count, batch, repeats])
    command = [sys.executable, "-c", IN_OWN_PROCESS, asked]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rates(found: dict[str, Any], sizes: int) -> Table:
    """Measure evaluations per second by size, the largest in a process of its own."""
    rows = []
    for ops, device_count, batch, bar in SIZES[:sizes]:
        if ops < 10**6:
            own = evaluations_per_s(ops, device_count, batch, REPEATS)
        else:
            process = in_own_process(ops, device_count, batch, 3)
            own = process["evaluations_per_s"]
            found["peak_bytes"], found["peak_bar_bytes"] = process["peak_bytes"], LARGEST_BYTES
        found[f"{ops} ops, {device_count} devices"] = own
        numbers = statistics.median(own), min(own), max(own), bar
        middle, low, high, least = (f"{number:,.{0 if bar > 10 else 1}f}" for number in numbers)
        rows.append((f"{ops:,}", f"{device_count}", middle, f"{low} to {high}", least))
    return Table(
        "Simulator",
        "evaluations per second on one core, most edges crossing devices",
        ("ops", "devices", "median", "range", "at least"),
        tuple(rows),
    )


def options(found: dict[str, Any]) -> Table:
    """Measure the cost of options and the gain of threads on 1,000 ops and 8 devices."""
    ops, device_count, batch, _ = SIZES[1]
    problem = Problem.of(flat_layered(ops, WIDTH, seed=0), cluster_of(device_count))
    devices, same = placements(ops, device_count, batch)
    plain = Simulator(problem)
    peak_bytes = max(
        int(plain.run(d, p).peak_bytes.max()) for d, p in zip(devices, same, strict=True)
    )
    twice, tight = (
        Simulator(replace(problem, memory_bytes=np.full(device_count, room)))
        for room in (2 * peak_bytes, peak_bytes)
    )
    [link] = problem.cluster.links
    by_priority = replace(problem.cluster, links=(replace(link, order="priority"),))

    def rate(
        simulator: Simulator,
        priority: NDArray[np.float64] = same,
        clock: Callable[[], float] = time.thread_time,
    ) -> float:
        times = seconds(lambda: simulator.step_ns(devices, priority), REPEATS, clock)
        return batch / statistics.median(times)

    found["evaluations_per_s"] = own = {
        "default": rate(plain),
        "other priorities each time": rate(plain, np.random.default_rng(2).random(same.shape)),
        "memory not counted": rate(Simulator(problem, memory=False)),
        "memory twice the peak": rate(twice),
        "memory just enough": rate(tight),
        "links by priority": rate(Simulator(Problem.of(problem.graph, by_priority))),
    }
    both = Simulator(problem, threads=2)
    ratios = [
        rate(both, clock=time.perf_counter) / rate(plain, clock=time.perf_counter)
        for _ in range(REPEATS)
    ]
    found["two_threads_over_one"] = sorted(ratios)
    rows = [(name, f"{value:,.0f} /s") for name, value in own.items()]
    threads = f"{statistics.median(ratios):.2f}x (at least {PARALLEL_BAR}x)"
    return Table(
        "Simulator, options",
        f"evaluations per second on one core, {ops:,} ops on {device_count} devices",
        ("option", "rate"),
        (*rows, ("two threads over one, by wall time", threads)),
    )


def with_cpu(cluster: Cluster) -> Cluster:
    """Return the cluster with a CPU in place of its last device."""
    last = cluster.devices[-1]
    cpu = replace(last, name="cpu", kind="cpu", launch_s=0.0)
    names = (*cluster.names[:-1], "cpu")
    links = tuple(replace(link, between=names) for link in cluster.links)
    return replace(cluster, devices=(*cluster.devices[:-1], cpu), links=links)


def hosts(found: dict[str, Any]) -> Table:
    """Time clusters with a host against the same clusters without, in pairs."""
    moe = sketches.moe(np.random.default_rng(5), layers=6, experts=16, tokens=2048)
    graphs = {
        "layered": flat_layered(1_000, WIDTH, seed=0),
        "mixture of experts": GraphArrays.from_graph(moe),
        "translation": GraphArrays.from_graph(sketches.nmt(layers=4, steps=24, batch=128)),
    }
    clusters = {"4 GPUs": cluster_of(4), "GPU and CPU": with_cpu(cluster_of(2))}
    rows = []
    for (name, graph), (where, cluster) in product(graphs.items(), clusters.items()):
        devices, _ = placements(len(graph), len(cluster), batch=100)
        same = np.empty(devices.shape)
        same[:, graph.topological] = -np.arange(len(graph))
        rng = np.random.default_rng(3)  # as annealing moves ops: a few, by some places
        moves = rng.normal(0.0, len(graph) / 20, devices.shape) * (rng.random(devices.shape) < 0.01)
        hosted = replace(cluster, hosts=(Host(devices=cluster.names),))
        both = [Simulator(Problem.of(graph, one)) for one in (cluster, hosted)]
        cells = []
        for priority in (same, same + moves):
            runs = [partial(one.step_ns, devices, priority) for one in both]
            pairs = [[seconds(run, 2, time.thread_time)[0] for run in runs] for _ in range(REPEATS)]
            cells.append(statistics.median(host_s / workers_s for workers_s, host_s in pairs))
        found[f"{name}, {where}"] = cells
        rows.append((name, f"{len(graph):,}", where, *(f"{cell:.2f}" for cell in cells)))
    return Table(
        "Simulator, hosts",
        "time of a step with one host over the time without, on the same cluster",
        ("graph", "ops", "devices", "same order of issue", "another each time"),
        tuple(rows),
    )


def plain(found: dict[str, Any]) -> Table:
    """Compare with the plain simulator on the same placements in the same run."""
    ops, device_count, batch = 200, 4, 2000
    graph, cluster = layered(np.random.default_rng(0), ops=ops, width=WIDTH), cluster_of(4)
    compiled = Simulator(Problem.of(GraphArrays.from_graph(graph), cluster))
    slow = PlainSimulator(graph, cluster)
    devices, same = placements(ops, device_count, batch)
    steps = compiled.step_ns(devices, same).tolist()
    for k in range(20):
        if slow.step(devices[k].tolist(), same[k].tolist())[0] != steps[k]:
            raise AssertionError("the plain simulator returns another step time")
    where, priority = devices[0].tolist(), same[0].tolist()
    own_s = statistics.median(seconds(lambda: compiled.step_ns(devices, same))) / batch
    plain_s = statistics.median(seconds(lambda: slow.step(where, priority), 50))
    found.update(ops=ops, devices=device_count, own_s=own_s, plain_s=plain_s)
    row = f"{1 / own_s:,.0f}", f"{1 / plain_s:,.0f}", f"{plain_s / own_s:,.0f}x", f"{PLAIN_BAR}x"
    return Table(
        "Simulator against a plain one",
        f"evaluations per second, heapq and networkx, {ops} ops on {device_count} devices",
        ("problem", "compiled", "plain", "ratio", "at least"),
        (("random layered", *row),),
    )


def cold(found: dict[str, Any]) -> Table:
    """Time a process that imports the simulator and evaluates once, with a warm compile cache."""
    found.update(in_own_process(100, 4, 1, 1))
    loaded = "with torch" if found["with_torch"] else "without torch"
    return Table(
        "Simulator, new process",
        "seconds from its start to the first evaluation, compiled code in the cache",
        ("process", "seconds", "at most"),
        ((loaded, f"{found['process_s']:.2f}", f"{COLD_BAR_S}"),),
    )


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts."""
    sizes = effort.pick(quick=QUICK_SIZES, normal=len(SIZES), full=len(SIZES))
    quick: dict[str, Part] = {"rates": lambda found: rates(found, sizes), "plain": plain}
    rest: dict[str, Part] = {"options": options, "hosts": hosts, "cold": cold}
    return effort.pick(quick=quick, normal=quick | rest, full=quick | rest)
