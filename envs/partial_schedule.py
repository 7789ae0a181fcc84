"""A schedule that grows op by op: features of the next op, valid devices, a chart as text."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator.bounds import levels

OP_FEATURES: Final = (
    "cost",
    "output_transfer",
    "head_share",
    "tail_share",
    "in_degree",
    "out_degree",
    "group_size",
    "placed_share",
)
DEVICE_FEATURES: Final = (
    "cost_here",
    "load",
    "free_at",
    "inputs_at",
    "finish_at",
    "transfer_bytes",
    "memory_left_share",
    "allowed",
)
CHART_COLUMNS: Final = 60


class PartialSchedule:
    """A list schedule, without link queues, of the ops that have a device.

    Ops are placed in topological order, a co-location group all at once. ``current`` is the next op
    to be placed, -1 if there is none. ``priority`` (N,) are bottom levels (upward ranks).
    """

    def __init__(self, problem: Problem) -> None:
        """Compute everything that is the same for all schedules; no op has a device yet."""
        self.problem, graph = problem, problem.graph
        allowed_ns = np.where(problem.allowed, problem.cost_ns, 0).sum(axis=1)
        mean_ns = allowed_ns / problem.allowed.sum(axis=1)
        self.cheapest_ns = problem.cheapest_ns()
        self._scale_ns = max(float(self.cheapest_ns.mean()), 1.0)
        pairs = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
        latency_ns = problem.latency_s[pairs].mean() * 1e9 if pairs.any() else 0.0
        ns_per_byte = (1e9 / problem.bandwidth_bytes_per_s[pairs]).mean() if pairs.any() else 0.0
        edge_ns = latency_ns + graph.edge_bytes[graph.predecessor_edge] * ns_per_byte
        head, self.priority = levels(graph, edge_ns, mean_ns)
        path_ns = max(float((head + self.priority).max()), 1.0)
        self._members = [np.array([op]) for op in range(problem.op_count)]
        for group in range(int(graph.group.max(initial=-1)) + 1):
            together = np.flatnonzero(graph.group == group)
            for op in together:
                self._members[op] = together
        self._mean_bytes = max(float(graph.edge_bytes.mean()) if graph.edge_count else 0.0, 1.0)
        stays = graph.resident_bytes + problem.held_bytes
        self._stays_bytes = np.array([stays[members].sum() for members in self._members])
        self._unit_ns = np.array(
            [problem.cost_ns[members].sum(axis=0) for members in self._members]
        )
        self._op_features = np.stack(
            [
                np.log1p(mean_ns / self._scale_ns),
                np.log1p((latency_ns + graph.output_bytes * ns_per_byte) / self._scale_ns),
                head / path_ns,
                self.priority / path_ns,
                np.log1p(np.diff(graph.predecessor_start)),
                np.log1p(np.diff(graph.successor_start)),
                np.log1p([len(members) for members in self._members]),
            ],
            axis=1,
        )
        self.clear()

    def clear(self) -> None:
        """Take the devices of all ops away."""
        devices = self.problem.device_count
        self.devices = np.full(self.problem.op_count, -1, np.int32)
        self._start_ns = np.full(self.problem.op_count, np.nan)
        self._finish_ns = np.full(self.problem.op_count, np.nan)
        self._free_ns = np.zeros(devices)
        self._load_ns = np.zeros(devices)
        self._room_bytes = np.array(self.problem.memory_bytes)
        self._position = 0
        self._advance()

    def place(self, device: int) -> None:
        """Put the current op and its group on a device, and go on to the next op."""
        self.devices[self._members[self.current]] = device
        self._room_bytes[device] -= self._stays_bytes[self.current]
        self._advance()

    def mask(self) -> NDArray[np.bool_]:
        """Return the devices where the current op may go, (D,); if none is left, all allowed ones.

        A device is valid if it is allowed, linked to the devices of all inputs, and has room for
        the memory known to stay there.
        """
        if self.current < 0:
            return np.ones(self.problem.device_count, np.bool_)
        allowed = self.problem.allowed[self.current]
        mask = allowed & (self._room_bytes >= self._stays_bytes[self.current])
        graph = self.problem.graph
        for op in self._members[self.current]:
            span = slice(graph.predecessor_start[op], graph.predecessor_start[op + 1])
            for source in graph.predecessors[span]:
                if self.devices[source] >= 0:
                    mask &= self.problem.connected[self.devices[source]]
        return np.asarray(mask if mask.any() else allowed)

    def features(self) -> NDArray[np.float32]:
        """Return OP_FEATURES of the current op, then DEVICE_FEATURES of every device, (8 + 8 D,).

        All are 0 if every op has a device.
        """
        if self.current < 0:
            count = len(OP_FEATURES) + self.problem.device_count * len(DEVICE_FEATURES)
            return np.zeros(count, np.float32)
        op = self.current
        inputs_at, bring = self._inputs_at_ns(op)
        now = float(self._free_ns.min())
        begin = np.maximum(inputs_at, self._free_ns)
        times = (
            self._unit_ns[op],
            self._load_ns - self._load_ns.min(),
            self._free_ns - now,
            np.maximum(inputs_at - now, 0.0),
            begin - now + self._unit_ns[op],
        )
        room = np.clip(self._room_bytes / np.maximum(self.problem.memory_bytes, 1), 0.0, 1.0)
        devices = np.stack(
            [
                *(np.log1p(ns / self._scale_ns) for ns in times),
                np.log1p(bring / self._mean_bytes),
                room,
                self.mask(),
            ],
            axis=1,
        )
        own = np.append(self._op_features[op], self._position / self.problem.op_count)
        return np.concatenate([own, devices.ravel()]).astype(np.float32)

    def __str__(self) -> str:
        chart = schedule_chart(self.problem, self.devices, self._start_ns, self._finish_ns)
        if self.current < 0:
            return chart
        return f"{chart}next op: {self.problem.graph.ids[self.current]}\n"

    def _advance(self) -> None:
        # Schedules ops that have a device; the next one without becomes the current op.
        order = self.problem.graph.topological
        while self._position < len(order) and self.devices[order[self._position]] >= 0:
            op = int(order[self._position])
            device = self.devices[op]
            begin = max(self._free_ns[device], self._inputs_at_ns(op)[0][device])
            cost = self.problem.cost_ns[op, device]
            self._start_ns[op] = begin
            self._finish_ns[op] = self._free_ns[device] = begin + cost
            self._load_ns[device] += cost
            self._position += 1
        self.current = int(order[self._position]) if self._position < len(order) else -1

    def _inputs_at_ns(self, op: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # Earliest time of all inputs on each device, (D,), and the bytes to transfer there, (D,).
        problem, graph = self.problem, self.problem.graph
        arrival = np.zeros(problem.device_count)
        bring = np.zeros(problem.device_count)
        span = slice(graph.predecessor_start[op], graph.predecessor_start[op + 1])
        for source, edge in zip(
            graph.predecessors[span], graph.predecessor_edge[span], strict=True
        ):
            home = self.devices[source]
            size = float(graph.edge_bytes[edge])
            away = np.arange(problem.device_count) != home
            transfer = problem.latency_s[home] + size / problem.bandwidth_bytes_per_s[home]
            arrival = np.maximum(arrival, self._finish_ns[source] + away * transfer * 1e9)
            bring += size * away
        return arrival, bring


def schedule_chart(
    problem: Problem,
    devices: NDArray[np.int32],
    start_ns: NDArray[np.floating] | NDArray[np.int64],
    end_ns: NDArray[np.floating] | NDArray[np.int64],
) -> str:
    """Return a schedule as text: a line for every device, with its ops as bars along the time.

    Neighbouring ops alternate between ``#`` and ``=``; ops whose end is NaN are left out.
    """
    placed = np.flatnonzero(~np.isnan(end_ns))
    span_ns = max(float(end_ns[placed].max(initial=0)), 1.0)
    title = f"{problem.graph.name}: {len(placed)} of {problem.op_count} ops placed"
    lines = [f"{title}, {end_ns[placed].max(initial=0) / 1e6:.4g} ms"]
    width = max(map(len, problem.cluster.names))
    for device, name in enumerate(problem.cluster.names):
        own = placed[devices[placed] == device]
        own = own[np.argsort(start_ns[own], kind="stable")]
        row = [" "] * CHART_COLUMNS
        for number, op in enumerate(own):
            first = int(start_ns[op] / span_ns * (CHART_COLUMNS - 1))
            last = int(end_ns[op] / span_ns * (CHART_COLUMNS - 1))
            row[first : last + 1] = "#="[number % 2] * (last + 1 - first)
        lines.append(f"{name:<{width}} |{''.join(row)}| {len(own)} ops")
    return "\n".join(lines) + "\n"
