"""The order in which a sweep places the ops of a problem, and its per-op tables."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled_tables import by_pointer
from envs.max_load import HOST_KIND, least_send_ns
from envs.problem import Problem
from graphs.graph import GraphArrays

Bools = NDArray[np.bool_]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@by_pointer
class SweepPlan(NamedTuple):
    """Ops in the order of a sweep: N ops, D devices, R reads of outputs.

    While later ops depend on the device of an output or of a co-location group, it has a slot.
    """

    cost_ns: Longs  # (N, D), -1 where the op may not run
    send_ns: Longs  # (N,) lower bound on one transfer of the output
    rest_ns: Longs  # (N + 1,) least work of op i and all after it
    pays: Bools  # (D,) whether the device is charged for transfers
    alike: Ints  # (D,) equal for interchangeable devices
    read_start: Ints  # (N + 1,)
    read_slot: Ints  # (R,) slot of the output that is read
    read_op: Ints  # (R,) op that produced it
    read_last: Bools  # (R,) whether this is its last read
    own_slot: Ints  # (N,) slot of the output, -1 if it is never read
    group_slot: Ints  # (N,) slot of the co-location group, -1 for none
    group_last: Bools  # (N,) whether this is the last op of the group


def narrow_order(graph: GraphArrays) -> NDArray[np.int32]:
    """Return all ops (N,) in a topological order that keeps few outputs in use at a time.

    Greedy: always the op that frees most outputs; among equals, the one that became ready last.
    """
    unread = np.diff(graph.successor_start).tolist()
    missing = np.diff(graph.predecessor_start).tolist()
    reads, readers = (
        _lists(graph.predecessor_start, graph.predecessors),
        _lists(graph.successor_start, graph.successors),
    )
    since = {i: -1 for i in graph.topological.tolist() if not missing[i]}
    order: list[int] = []

    def growth(i: int) -> tuple[int, int]:
        return bool(readers[i]) - sum(unread[u] == 1 for u in reads[i]), -since[i]

    while since:
        chosen = min(since, key=growth)
        del since[chosen]
        order.append(chosen)
        for u in reads[chosen]:
            unread[u] -= 1
        for v in readers[chosen]:
            missing[v] -= 1
            if not missing[v]:
                since[v] = len(order)
    return np.array(order, np.int32)


def sweep_plan(problem: Problem) -> tuple[SweepPlan, int]:
    """Return the plan of a problem, and its number of slots."""
    graph = problem.graph
    order = narrow_order(graph)
    cost = np.where(problem.allowed, problem.cost_ns, -1)
    pays = np.array([device.kind != HOST_KIND for device in problem.cluster.devices], np.bool_)
    numbers: dict[tuple[bytes, bool], int] = {}
    alike = [numbers.setdefault((cost[:, d].tobytes(), bool(pays[d])), d) for d in range(len(pays))]
    never = np.iinfo(np.int64).max
    least = np.where(problem.allowed, problem.cost_ns, never).min(axis=1)[order]
    slots = _Slots()
    unread = np.diff(graph.successor_start).tolist()
    members = np.bincount(graph.group[graph.group >= 0], minlength=0).tolist()
    reads = _lists(graph.predecessor_start, graph.predecessors)
    position = np.empty(len(graph), np.int64)
    position[order] = np.arange(len(graph))
    read_slot, read_op, read_last, own_slot, group_slot, group_last = [], [], [], [], [], []
    for i in order.tolist():
        group = int(graph.group[i])
        done: list[tuple[str, int]] = []
        for u in reads[i]:
            unread[u] -= 1
            read_slot.append(slots.of("output", u))
            read_op.append(int(position[u]))
            read_last.append(not unread[u])
            done += [("output", u)] * (not unread[u])
        if group >= 0:
            members[group] -= 1
            done += [("group", group)] * (not members[group])
        group_slot.append(slots.of("group", group) if group >= 0 else -1)
        group_last.append(group >= 0 and not members[group])
        own_slot.append(slots.of("output", i) if unread[i] else -1)
        for key in done:
            slots.free(*key)
    plan = SweepPlan(
        cost_ns=np.ascontiguousarray(cost[order]),
        send_ns=least_send_ns(problem)[order],
        rest_ns=np.append(np.cumsum(least[::-1])[::-1], 0).astype(np.int64),
        pays=pays,
        alike=np.array(alike, np.int32),
        read_start=np.append(0, np.cumsum([len(reads[i]) for i in order])).astype(np.int32),
        read_slot=np.array(read_slot, np.int32),
        read_op=np.array(read_op, np.int32),
        read_last=np.array(read_last, np.bool_),
        own_slot=np.array(own_slot, np.int32),
        group_slot=np.array(group_slot, np.int32),
        group_last=np.array(group_last, np.bool_),
    )
    return plan, slots.count


class _Slots:
    """Slot numbers, reused once they are free."""

    def __init__(self) -> None:
        self.count = 0
        self._number: dict[tuple[str, int], int] = {}
        self._unused: list[int] = []

    def of(self, what: str, which: int) -> int:
        key = (what, which)
        if key not in self._number:
            if not self._unused:
                self._unused.append(self.count)
                self.count += 1
            self._number[key] = self._unused.pop()
        return self._number[key]

    def free(self, what: str, which: int) -> None:
        self._unused.append(self._number.pop((what, which)))


def _lists(start: NDArray[np.int32], values: NDArray[np.int32]) -> list[list[int]]:
    borders = start.tolist()
    return [values[a:b].tolist() for a, b in pairwise(borders)]
