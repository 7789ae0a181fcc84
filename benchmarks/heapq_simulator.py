"""Plain simulator on heapq and networkx for clusters with one "egress" link.

It returns the same step time and peak memory as the compiled simulator if all devices share one
full-duplex link with a queue per sender, and ops cost the same on all devices and more than 0 s.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import networkx as nx

from envs.cluster import Cluster

OP_ENDS, TRANSFER_ENDS = 0, 1


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


class HeapqSimulator:
    """Simulates placements of one graph on one cluster."""

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
