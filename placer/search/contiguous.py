"""Contiguous parts of a topological order, one per device, that minimize the slowest part.

The time of a part is the cost of its ops plus its incoming and outgoing transfers, as counted by
:mod:`envs.simulator.max_load`. It depends only on the two ends of the part, so the best borders
follow by dynamic programming, as for pipelines of layers (PipeDream, arXiv 1806.03377).

:func:`contiguous` also chooses the order of the devices, and counts the links between neighbouring
parts: the result is optimal for a chain. In other graphs, an output that crosses several parts
counts as if each part forwarded it, and all outputs that cross a cut count. :func:`pipeline_parts`
takes the devices in their order and all links as the best one, and counts every output once: its
result is optimal for any graph if links are equal and there are no groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled
from envs.problem import Problem
from envs.simulator.max_load import HOST_KIND, least_send_ns
from graphs.coarsen.merging import edge_sources
from graphs.graph import GraphArrays
from placer.search.grouping import spread, units

Floats = NDArray[np.float64]

MOST_PLACES: Final = 400
"""Maximum number of cuts; with more units, cuts are spaced evenly by cost."""
NO_PART: Final = -1
MOST_ORDERED: Final = 4
"""With at most this many devices all device orders are tried, with more the given order and fastest
to slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A sequence of units (co-location groups or ops) with P + 1 places where it may be cut.

    ``cost`` and ``kept`` are sums over all units before a place: cost on each device, and bytes
    that stay in memory. ``count`` and ``size`` describe the outputs that cross a place: forward in
    row 0, backward in row 1.
    """

    place: NDArray[np.int64]  # (P + 1,) of units, from 0 to U
    unit_of: NDArray[np.int64]  # (N,)
    cost: Floats  # (P + 1, D) ns
    kept: Floats  # (P + 1,) bytes
    count: Floats  # (2, P + 1)
    size: Floats  # (2, P + 1) bytes


def contiguous(problem: Problem, *, keep_outputs: bool = True) -> NDArray[np.int32] | None:
    """Return devices (N,), with at most one part per device, or None if memory does not suffice.

    A part needs memory for its parameters and, with ``keep_outputs``, for all outputs and
    workspaces. A unit that is not allowed on the device of its part goes to the cheapest allowed
    one.
    """
    line = _line(problem, keep_outputs)
    best, found = np.inf, None
    for order in _orders(problem):
        slowest, wish = _Split(problem, line, order).solve()
        if slowest < best:
            best, found = slowest, wish
    return None if found is None else spread(problem, found)


def _orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    count = problem.device_count
    if count <= MOST_ORDERED:
        yield from permutations(range(count))
        return
    yield tuple(range(count))
    runs = np.maximum(problem.allowed.sum(axis=0), 1)
    yield tuple(np.argsort(problem.cost_ns.sum(axis=0) / runs, kind="stable").tolist())


def _line(problem: Problem, keep_outputs: bool) -> _Line:
    graph = problem.graph
    row = units(problem)
    unit_of, count = row.group_of, len(row)
    kept_bytes = graph.resident_bytes.astype(np.float64)
    if keep_outputs:
        kept_bytes = kept_bytes + graph.output_bytes + graph.workspace_bytes
    cost = _before(row.cost_ns.astype(np.float64))
    place = _places(cost.sum(axis=1))
    passing = np.zeros((2, 2, count + 1))  # outputs and bytes, forward and backward
    source, target = unit_of[edge_sources(graph)], unit_of[graph.successors]
    producer = edge_sources(graph)
    for way, forward in enumerate((True, False)):
        used = (source < target) if forward else (source > target)
        far = np.full(len(graph), -1 if forward else count)
        reach = np.maximum if forward else np.minimum
        reach.at(far, producer[used], target[used])
        size = np.zeros(len(graph))
        np.maximum.at(size, producer[used], graph.edge_bytes[used].astype(np.float64))
        sends = np.unique(producer[used])
        low = np.minimum(unit_of[sends], far[sends]) + 1
        high = np.maximum(unit_of[sends], far[sends]) + 1
        for what, amount in enumerate((np.ones(len(sends)), size[sends])):
            np.add.at(passing[what, way], low, amount)
            np.add.at(passing[what, way], high, -amount)
    passing = passing.cumsum(axis=2)
    kept = np.bincount(unit_of, kept_bytes, minlength=count).astype(np.float64)
    return _Line(
        place=place,
        unit_of=unit_of,
        cost=cost[place],
        kept=_before(kept)[place],
        count=passing[0][:, place].round(),
        size=passing[1][:, place].round(),
    )


def _before(values: Floats) -> Floats:
    """Return the sums of all rows before each place (one more than there are rows)."""
    return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])


def _places(cost: Floats) -> NDArray[np.int64]:
    if len(cost) <= MOST_PLACES + 1:
        return np.arange(len(cost))
    even = np.searchsorted(cost, np.linspace(0.0, cost[-1], MOST_PLACES + 1))
    return np.unique([0, *even.tolist(), len(cost) - 1])


class _Split:
    """The best split over devices in one order, which numbers the parts; parts may be left out.

    ``closed[q, p]`` (P + 1,) is the time in ns of the slowest part so far if part p begins at each
    place, right after part q, whose end is then known; q is -1 for the first part. ``came[q, p]``
    holds the number of the part before q, and the place where q begins.
    """

    def __init__(self, problem: Problem, line: _Line, order: tuple[int, ...]) -> None:
        self.problem = problem
        self.line = line
        self.order = order
        self.places = len(line.place)
        at_start = np.where(np.arange(self.places) == 0, 0.0, np.inf)
        self.closed = {(NO_PART, p): at_start for p in range(len(order))}
        self.came: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def solve(self) -> tuple[float, NDArray[np.int64] | None]:
        """Return the time of the slowest part and devices (N,), or inf and None if nothing fits."""
        best, last = np.inf, (NO_PART, 0, 0)
        for p in range(len(self.order)):
            begun = self._begun(p)
            for q, (part, closed) in begun.items():
                whole = np.maximum(part, closed)[:, -1]
                if whole.min() < best:
                    best, last = float(whole.min()), (q, p, int(whole.argmin()))
            for follower in range(p + 1, len(self.order)):
                self._close(p, follower, begun)
        return best, self._devices(*last) if np.isfinite(best) else None

    def _begun(self, p: int) -> dict[int, tuple[Floats, Floats]]:
        """Return {part before p: (times of p between all places, slowest closed part)}."""
        own = _part_ns(self.problem, self.line, self.order[p])
        begun = {NO_PART: (own, self.closed[NO_PART, p][:, None])}
        for q in range(p):
            enter = _cut_ns(self.problem, self.line, self.order[q], self.order[p])[1]
            begun[q] = own + enter[:, None], self.closed[q, p][:, None]
        return begun

    def _close(self, p: int, follower: int, begun: dict[int, tuple[Floats, Floats]]) -> None:
        leave = _cut_ns(self.problem, self.line, self.order[p], self.order[follower])[0]
        slowest = np.stack([np.maximum(part + leave, closed) for part, closed in begun.values()])
        flat = slowest.reshape(-1, self.places)
        row = flat.argmin(axis=0)
        before = np.array(list(begun))[row // self.places]
        self.closed[p, follower] = flat[row, np.arange(self.places)]
        self.came[p, follower] = before, row % self.places

    def _devices(self, q: int, p: int, begin: int) -> NDArray[np.int64]:
        """Return devices (N,) if the last part is p, begins at ``begin`` and follows part q."""
        of_unit = np.full(int(self.line.unit_of.max()) + 1, self.order[p])
        while q != NO_PART:
            of_unit[: self.line.place[begin]] = self.order[q]
            before, start = self.came[q, p]
            q, p, begin = int(before[begin]), q, int(start[begin])
        return of_unit[self.line.unit_of]


def _part_ns(problem: Problem, line: _Line, d: int) -> Floats:
    """Return the cost of the units between all pairs of places, inf if out of memory."""
    part = line.cost[None, :, d] - line.cost[:, None, d]
    fits = line.kept[None] - line.kept[:, None] <= problem.memory_bytes[d]
    later = np.arange(len(line.place))[None] > np.arange(len(line.place))[:, None]
    return np.where(fits & later, part, np.inf)


def _cut_ns(problem: Problem, line: _Line, before: int, after: int) -> tuple[Floats, Floats]:
    """Return the time that a cut costs the device before and the one after it, (P + 1,) each."""
    total = np.zeros(len(line.place))
    for way, (s, d) in enumerate(((before, after), (after, before))):
        seconds = (
            line.count[way] * problem.latency_s[s, d]
            + line.size[way] / problem.bandwidth_bytes_per_s[s, d]
        )
        blocked = (line.count[way] > 0) & ~problem.connected[s, d]
        total += np.where(blocked, np.inf, np.rint(seconds * 1e9))
    pays = [problem.cluster.devices[d].kind != HOST_KIND for d in (before, after)]
    costs = [total if own else np.where(np.isinf(total), total, 0.0) for own in pays]
    return costs[0], costs[1]


MOST_STEPS: Final = 20_000_000
"""Maximum number of steps of the dynamic programming; longer orders are cut at fewer, evenly spaced
places."""
NEVER_NS: Final = 1 << 62

Bools = NDArray[np.bool_]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


def narrow_order(graph: GraphArrays) -> NDArray[np.int32]:
    """Return all ops (N,) in a topological order that keeps few outputs in use at a time.

    Greedy: always the op that frees most outputs; among equals, the one that became ready last.
    """
    unread = np.diff(graph.successor_start).tolist()
    missing = np.diff(graph.predecessor_start).tolist()
    reads = _lists(graph.predecessor_start, graph.predecessors)
    readers = _lists(graph.successor_start, graph.successors)
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


def _lists(start: NDArray[np.int32], values: NDArray[np.int32]) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in pairwise(start.tolist())]


def pipeline_parts(problem: Problem, order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return devices (N,) of the best parts of a topological order (N,); parts may be empty.

    The first device has the first part. Transfers count as on the best link, and co-location is
    enforced only at the end: exact if links are equal and there are no groups. If no parts fit into
    memory, memory is ignored.
    """
    graph, count = problem.graph, problem.op_count
    starts = max(MOST_STEPS // max(count * problem.device_count, 1), 4 * problem.device_count)
    borders = np.unique(np.linspace(0, count, min(count, starts) + 1).astype(np.int32))
    position = np.empty(count, np.int32)
    position[order] = np.arange(count)
    source = np.repeat(np.arange(count), np.diff(graph.successor_start))
    last_reader = position.copy()
    np.maximum.at(last_reader, source, position[graph.successors])
    size = graph.resident_bytes + graph.output_bytes + graph.workspace_bytes
    pays = np.array([device.kind != HOST_KIND for device in problem.cluster.devices], np.bool_)
    wish = np.zeros(count, np.int64)
    for memory_bytes in (problem.memory_bytes, np.full(problem.device_count, NEVER_NS)):
        ends = _best_ends(
            np.where(problem.allowed, problem.cost_ns, -1),
            least_send_ns(problem),
            size,
            memory_bytes.astype(np.int64),
            pays,
            np.array(order, np.int32),
            position,
            last_reader,
            graph.predecessor_start.copy(),
            graph.predecessors.copy(),
            borders,
        )
        if ends[-1] == count:
            wish[order] = np.searchsorted(ends, np.arange(count), side="right")
            break
    return spread(problem, wish)


@compiled
def _best_ends(
    cost_ns: Longs,
    send_ns: Longs,
    size_bytes: Longs,
    memory_bytes: Longs,
    pays: Bools,
    order: Ints,
    position: Ints,
    last_reader: Ints,
    read_start: Ints,
    reads: Ints,
    borders: Ints,
) -> Longs:
    """Return the end of each device's part, (D,), or all -1 if there are no such parts."""
    places, devices = len(borders), len(memory_bytes)
    best = np.full((devices + 1, places), NEVER_NS, np.int64)
    chosen = np.full((devices + 1, places), -1, np.int32)
    best[0, 0] = 0
    received = np.full(len(order), -1, np.int64)
    for d in range(devices):
        for a in range(places):
            so_far = best[d, a]
            if so_far >= best[d + 1, places - 1]:
                continue
            if so_far < best[d + 1, a]:
                best[d + 1, a], chosen[d + 1, a] = so_far, a
            kept, sent, used = 0, 0, 0
            for b in range(a + 1, places):
                fits = True
                for at in range(borders[b - 1], borders[b]):
                    i = order[at]
                    fits = fits and cost_ns[i, d] >= 0
                    kept += cost_ns[i, d]
                    used += size_bytes[i]
                    if pays[d] and last_reader[i] > at:
                        sent += send_ns[i]
                    for k in range(read_start[i], read_start[i + 1]):
                        u = reads[k]
                        if not pays[d]:
                            continue
                        if position[u] >= borders[a]:
                            sent -= send_ns[u] if last_reader[u] == at else 0
                        elif received[u] != d * places + a:
                            received[u] = d * places + a
                            kept += send_ns[u]
                if not fits or used > memory_bytes[d] or kept >= best[d + 1, places - 1]:
                    break
                load = max(so_far, kept + sent)
                if load < best[d + 1, b]:
                    best[d + 1, b], chosen[d + 1, b] = load, a
    ends = np.full(devices, -1, np.int64)
    if best[devices, places - 1] < NEVER_NS:
        at = places - 1
        for d in range(devices, 0, -1):
            ends[d - 1] = borders[at]
            at = chosen[d, at]
    return ends
