"""Contiguous parts in topological order, the slowest as fast as it can be, by dynamic programming.

A part's time is what its ops cost and the transfers in and out of it, as :mod:`envs.max_load`
counts them. For a chain the answer is the best of all such splits. Elsewhere outputs that pass
several parts count as if each handed them on, and of a pass all outputs count.
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
"""Cuts that are considered, evenly spread over the cost where there are more."""
NO_PART: Final = -1
MOST_ORDERED: Final = 4
"""Up to so many devices are tried in every order, more in theirs and from fast to slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Units (co-location groups or ops) in a row, and P + 1 places where it may be cut.

    ``cost``, ``kept`` and ``most`` are those of all units before a place, on each device: what they
    cost and the bytes that stay. ``count`` and ``size`` are the outputs that pass a place: forward
    in row 0, backward in row 1.
    """

    place: NDArray[np.int64]  # (P + 1,) of units, from 0 to U
    unit_of: NDArray[np.int64]  # (N,)
    cost: Floats  # (P + 1, D) ns
    kept: Floats  # (P + 1,) bytes
    count: Floats  # (2, P + 1)
    size: Floats  # (2, P + 1) bytes


def contiguous(problem: Problem, *, keep_outputs: bool = True) -> NDArray[np.int32] | None:
    """Devices (N,), a part for each device or none; None where memory does not suffice.

    A part needs memory for its parameters and, with ``keep_outputs``, all outputs and workspaces.
    A unit that may not run on its part's device goes to the cheapest that it may.
    """
    line = _line(problem, keep_outputs)
    best, found = np.inf, None
    for order in _orders(problem):
        slowest, wish = _Split(problem, line, order).solve()
        if slowest < best:
            best, found = slowest, wish
    return None if found is None else spread(problem, found)


def _orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Orders of devices that are worth a try."""
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
    """Sums of all rows before each place, one more than there are rows."""
    return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])


def _places(cost: Floats) -> NDArray[np.int64]:
    """Places among the units, the first and the last among them."""
    if len(cost) <= MOST_PLACES + 1:
        return np.arange(len(cost))
    even = np.searchsorted(cost, np.linspace(0.0, cost[-1], MOST_PLACES + 1))
    return np.unique([0, *even.tolist(), len(cost) - 1])


class _Split:
    """The best split on devices in one order; its parts are numbered by it, and may be left out.

    ``closed[q, p]`` (P + 1,): the slowest part so far, ns, where part p begins at each place, right
    after part q, whose end is then known; q is -1 for the first part. ``came[q, p]``: the number
    of the part before q, and the place where q begins.
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
        """The time of the slowest part and devices (N,); inf and None where nothing fits."""
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
        """By the part before p: times of p from each place to each, and the slowest closed part."""
        own = _part_ns(self.problem, self.line, self.order[p])
        begun = {NO_PART: (own, self.closed[NO_PART, p][:, None])}
        for q in range(p):
            enter = _cut_ns(self.problem, self.line, self.order[q], self.order[p])[1]
            begun[q] = own + enter[:, None], self.closed[q, p][:, None]
        return begun

    def _close(self, p: int, follower: int, begun: dict[int, tuple[Floats, Floats]]) -> None:
        """End part p at each place, where ``follower`` begins."""
        leave = _cut_ns(self.problem, self.line, self.order[p], self.order[follower])[0]
        slowest = np.stack([np.maximum(part + leave, closed) for part, closed in begun.values()])
        flat = slowest.reshape(-1, self.places)
        row = flat.argmin(axis=0)
        before = np.array(list(begun))[row // self.places]
        self.closed[p, follower] = flat[row, np.arange(self.places)]
        self.came[p, follower] = before, row % self.places

    def _devices(self, q: int, p: int, begin: int) -> NDArray[np.int64]:
        """Devices (N,) where the last part is p, begins there and comes after q."""
        of_unit = np.full(int(self.line.unit_of.max()) + 1, self.order[p])
        while q != NO_PART:
            of_unit[: self.line.place[begin]] = self.order[q]
            before, start = self.came[q, p]
            q, p, begin = int(before[begin]), q, int(start[begin])
        return of_unit[self.line.unit_of]


def _part_ns(problem: Problem, line: _Line, d: int) -> Floats:
    """Cost of the units from each place to each later one on a device, inf where it is too full."""
    part = line.cost[None, :, d] - line.cost[:, None, d]
    fits = line.kept[None] - line.kept[:, None] <= problem.memory_bytes[d]
    later = np.arange(len(line.place))[None] > np.arange(len(line.place))[:, None]
    return np.where(fits & later, part, np.inf)


def _cut_ns(problem: Problem, line: _Line, before: int, after: int) -> tuple[Floats, Floats]:
    """What a cut at each place costs the device before it, and the one after it, (P + 1,) each."""
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
