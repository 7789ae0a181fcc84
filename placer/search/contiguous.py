"""Contiguous parts in topological order that minimize the slowest part, by dynamic programming.

The time of a part is the cost of its ops plus its incoming and outgoing transfers, as counted by
:mod:`envs.max_load`. For a chain the result is optimal among such splits. In other graphs, an
output that crosses several parts counts as if each part forwarded it, and all outputs that cross a
cut count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.max_load import HOST_KIND
from envs.problem import Problem
from graphs.quotient import edge_sources
from placer.search.grouping import units
from placer.search.trivial import spread

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
