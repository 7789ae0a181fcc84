"""Slow twin of the list scheduler's decoder: plain loops over ops, and arrays over devices.

Like the decoder it computes in single precision, with sums in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from envs.problem import Bools, Floats, Ints, Singles
from placer.search.list_scheduler.arrays import OP_FEATURE_COUNT, SchedulingArrays
from placer.search.list_scheduler.soft_log import soft_log

LOGARITHMIC = (0, 2, 3, 5, 6, 7, 9, 10, 13)
ZERO, ONE = np.float32(0.0), np.float32(1.0)


def decoded_twin(o: SchedulingArrays, weights: Floats) -> tuple[list[int], list[int]]:
    """Return devices and order of the ops for weights (21,); ops without groups, ample memory."""
    w = weights.astype(np.float32)
    a, b, c, d, e, f, g = (w[k] * o.op_features[k] for k in range(OP_FEATURE_COUNT))
    score = o.order_base + a + b
    score += c + d
    score += e + f
    score += g
    twin = _Twin(o)
    count = len(score)
    while len(twin.order) < count:
        ready = [
            v
            for v in range(count)
            if v not in twin.home and all(p in twin.home for p in twin.of(v))
        ]
        v = max(ready, key=lambda i: (score[i], -i))
        value = twin.values(v, ready, w[OP_FEATURE_COUNT:])
        twin.place(v, int(np.argmax(np.where(o.allowed[v], value, -np.inf))))
    return [twin.home[v] for v in range(count)], twin.order


@dataclass
class _Twin:
    o: SchedulingArrays
    home: dict[int, int] = field(default_factory=dict)
    finish: dict[int, np.float32] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    sent: dict[tuple[int, int], np.float32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        devices = self.o.device_count
        self.free, self.load = np.zeros(devices, np.float32), np.zeros(devices, np.float32)
        self.queue_free = np.zeros(self.o.queue_count + 1, np.float32)

    def edges(self, v: int) -> range:
        return range(self.o.predecessor_start[v], self.o.predecessor_start[v + 1])

    def of(self, v: int) -> list[int]:
        return [int(self.o.predecessors[e]) for e in self.edges(v)]

    def consumers(self, v: int) -> Ints:
        return self.o.successors[self.o.successor_start[v] : self.o.successor_start[v + 1]]

    def there(self, p: int) -> Bools:
        return np.array([(p, d) in self.sent for d in range(len(self.free))])

    def transfers(self, e: int) -> Singles:
        row, devices = self.home[int(self.o.predecessors[e])], self.o.device_count
        latency, ns_per_byte = self.o.latency[row, :devices], self.o.ns_per_byte[row, :devices]
        return np.asarray(latency + self.o.edge_bytes[e] * ns_per_byte)

    def arrivals(self, e: int) -> Singles:
        """Return when the input along an edge is on each device."""
        p = int(self.o.predecessors[e])
        free = self.queue_free[self.o.queue[self.home[p], : self.o.device_count]]
        times = np.maximum(self.finish[p], free) + self.transfers(e)
        return np.array([self.sent.get((p, d), t) for d, t in enumerate(times)])

    def heaviest(self, v: int) -> int | None:
        """Return the device of the heaviest input."""
        edge = max(self.edges(v), key=lambda e: (self.o.edge_ns[e], -e), default=None)
        return None if edge is None else self.home[int(self.o.predecessors[edge])]

    def siblings(self, v: int) -> tuple[Singles, np.float32]:
        """Return the transfer times of the consumers' other inputs on each device, and the sum."""
        of_devices, total = np.zeros(len(self.free), np.float32), ZERO
        for w in self.consumers(v)[:4].tolist():
            for e in self.edges(w)[:4]:
                if (p := int(self.o.predecessors[e])) in self.home:
                    of_devices[self.home[p]] += self.o.edge_ns[e]
                    total += self.o.edge_ns[e]
        return of_devices, total

    def values(self, v: int, ready: list[int], u: Singles) -> Singles:
        """Return the scores of the devices for op v."""
        o, devices, unit = self.o, np.arange(len(self.free)), np.float32(1.0 / self.o.scale)
        data, bring, have = (np.zeros(len(devices), np.float32) for _ in range(3))
        inputs = self.of(v)
        for e, p in zip(self.edges(v), inputs, strict=True):
            data = np.maximum(data, self.arrivals(e))
            bring += np.where(self.there(p), ZERO, self.transfers(e))
            have += np.where(self.there(p), o.edge_ns[e], ZERO)
        begin = np.maximum(self.free, data)
        end = begin + o.device_cost[v]
        crowd = np.zeros(len(devices), np.float32)
        for w in ready:
            if (home := self.heaviest(w)) is not None:
                crowd[home] += ONE
        allowed = o.allowed[v]
        regret = (end - end[allowed].min()) * unit
        rows = (
            regret,
            (begin - begin[allowed].min()) * unit,
            (self.free - self.free[allowed].min()) * unit,
            bring * unit,
            (begin - self.free) * unit,
            (begin - data) * unit,
            (self.load - self.load[allowed].min()) * unit,
            np.maximum(self.queue_free[o.out_queue[: o.device_count]] - begin, ZERO) * unit,
            crowd,
        )
        value = ZERO + u[1] * np.minimum(regret, np.float32(10.0))
        for f, row in zip(LOGARITHMIC, rows, strict=True):
            value += u[f] * soft_log(np.maximum(row, ZERO))  # below 0 only where v must not run
        value += (u[4] / o.inputs_ns[v] if o.inputs_ns[v] > ZERO else ZERO) * have
        siblings, siblings_ns = self.siblings(v)
        value += (u[8] / siblings_ns if siblings_ns > ZERO else ZERO) * siblings
        value += np.where(devices == self.heaviest(v), u[11], ZERO)
        if inputs:
            latest = max(inputs, key=lambda p: (self.finish[p], -inputs.index(p)))
            value += np.where(devices == self.home[latest], u[12], ZERO)
        return np.asarray(value)

    def place(self, v: int, d: int) -> None:
        """Put op v on device d, and send its inputs there."""
        begin = self.free[d]
        for e, p in zip(self.edges(v), self.of(v), strict=True):
            arrival = self.arrivals(e)[d]
            if (p, d) not in self.sent:
                q = self.o.queue[self.home[p], d]
                if q < self.o.queue_count:
                    self.queue_free[q] = arrival
                if self.o.once_per_destination:
                    self.sent[p, d] = arrival
            begin = max(begin, arrival)
        self.home[v], self.finish[v] = d, begin + self.o.cost[v, d]
        self.sent[v, d] = self.free[d] = self.finish[v]
        self.load[d] += self.o.cost[v, d]
        self.order.append(v)
