"""Merges of ops into groups such that the graph between groups stays acyclic.

Each function maps ``group_of`` (N,), the group of every op, to one with as many groups or fewer.
:class:`Quotient` is the graph between groups: distinct edges, cycles, and a depth-first topological
order, which :func:`cut` divides into a limited number of pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.graph import GraphArrays


@dataclass(frozen=True, slots=True, eq=False)
class Quotient:
    """G groups and the F distinct edges between different ones, sorted by source and target."""

    count: int
    source: NDArray[np.int64]  # (F,)
    target: NDArray[np.int64]  # (F,)

    @classmethod
    def of(cls, graph: GraphArrays, group_of: NDArray[np.int64]) -> Quotient:
        """Build the quotient by ``group_of`` (N,), which numbers groups from 0 without gaps."""
        count = int(group_of.max()) + 1
        source = group_of[edge_sources(graph)]
        target = group_of[graph.successors]
        between = source != target
        keys = np.unique(source[between] * count + target[between])
        return cls(count, keys // count, keys % count)

    def only_predecessor(self) -> NDArray[np.int64]:
        """Return the only group that each group reads from, (G,); -1 for none or several."""
        return _only(self.count, self.target, self.source)

    def only_successor(self) -> NDArray[np.int64]:
        """Return the only group that reads from each group, (G,); -1 for none or several."""
        return _only(self.count, self.source, self.target)

    def on_cycle(self) -> NDArray[np.bool_]:
        """Return whether each group is on a cycle, (G,)."""
        on_cycle = np.zeros(self.count, np.bool_)
        behind = np.ones(self.count, np.bool_)
        behind[self.depth_first(np.zeros(self.count, np.int64))] = False
        left = behind[self.source] & behind[self.target]
        if left.any():
            pairs = zip(self.source[left].tolist(), self.target[left].tolist(), strict=True)
            for component in nx.strongly_connected_components(nx.DiGraph(list(pairs))):
                on_cycle[list(component)] = len(component) > 1
        return on_cycle

    def depth_first(self, classes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return groups in a topological order that follows each branch to its end.

        It stays within one of the ``classes`` (G,) as long as any of its groups is ready, so that
        there are few runs of a class. Groups on or behind a cycle are left out.
        """
        start = np.searchsorted(self.source, np.arange(self.count + 1)).tolist()
        targets = self.target.tolist()
        waits_for = np.bincount(self.target, minlength=self.count).tolist()
        class_of = classes.tolist()
        ready: defaultdict[int, list[int]] = defaultdict(list)
        for g in range(self.count - 1, -1, -1):
            if waits_for[g] == 0:
                ready[class_of[g]].append(g)
        order: list[int] = []
        waiting = sorted(ready)  # a heap of classes, possibly repeated
        while waiting:
            current = heappop(waiting)
            stack = ready[current]
            while stack:
                g = stack.pop()
                order.append(g)
                # Reversed, so that the first comes off the stack first.
                for t in reversed(targets[start[g] : start[g + 1]]):
                    waits_for[t] -= 1
                    if waits_for[t] == 0:
                        if not ready[class_of[t]]:
                            heappush(waiting, class_of[t])
                        ready[class_of[t]].append(t)
        return np.array(order, np.int64)


def root_of(root: list[int], g: int) -> int:
    """Return the group that ``g`` was merged into, as a union-find forest; shortens its path."""
    while root[g] != g:
        root[g] = root[root[g]]
        g = root[g]
    return g


def edge_sources(graph: GraphArrays) -> NDArray[np.int64]:
    """Return the source of every edge, (E,)."""
    return np.repeat(np.arange(len(graph)), np.diff(graph.successor_start))


def renumbered(group_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the same groups, (N,), numbered without gaps in the order of their first ops."""
    _, first, inverse = np.unique(group_of, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _only(count: int, key: NDArray[np.int64], value: NDArray[np.int64]) -> NDArray[np.int64]:
    single = np.bincount(key, minlength=count)[key] == 1
    only = np.full(count, -1, np.int64)
    only[key[single]] = value[single]
    return only


ROUNDS: Final = 16
"""Maximum passes in each direction; a pass merges whole chains and trees, so few are needed."""


def colocated(
    graph: GraphArrays,
    group_of: NDArray[np.int64],
    label_of: NDArray[np.int64],
    classes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Merge groups of one label (N,), -1 for none, and one class, except those on cycles.

    A cycle arises where a path leaves a merged group and returns; what was merged into groups on a
    cycle stays separate. That breaks every cycle: a cycle between the remaining groups would be one
    between all groups, and the merged groups on cycles are gone.
    """
    by_label = label_of * (int(classes.max()) + 1) + classes
    merged = renumbered(np.where(label_of >= 0, by_label, -1 - group_of))
    if merged.max() == group_of.max():
        return group_of
    cyclic = Quotient.of(graph, merged).on_cycle()[merged]
    return renumbered(np.where(cyclic, -1 - group_of, merged))


def absorbed(
    graph: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    cost_s: NDArray[np.float64],
    least_cost_s: float,
) -> NDArray[np.int64]:
    """Merge cheap groups into the only group that they read from, or that reads from them.

    A group is cheap if it costs at most ``least_cost_s``; ``cost_s`` (N,) is inf where it is
    unknown. In a chain one of two neighbours must be cheap. Elsewhere the absorbed group must be,
    and all that a group absorbs at one place of its chain may cost ``least_cost_s`` at most, since
    it could have run in parallel. Neighbours that share a device anyway need not be cheap.

    No path leaves and re-enters a merged group: whatever leads to the absorbed group comes through
    its only predecessor. Merging never adds predecessors to another group, so that a pass may merge
    along all such edges at once; the same holds for the other direction.
    """
    merger = _Merger(graph, group_of, classes, cost_s, least_cost_s)
    for _ in range(ROUNDS):
        before = merger.count
        merger.merge(downwards=True)
        merger.merge(downwards=False)
        if merger.count == before:
            break
    return renumbered(merger.group_of)


class _Merger:
    """State of the groups while they are merged pass by pass."""

    def __init__(
        self,
        graph: GraphArrays,
        group_of: NDArray[np.int64],
        classes: NDArray[np.int64],
        cost_s: NDArray[np.float64],
        least_cost_s: float,
    ) -> None:
        self.graph = graph
        self.group_of = group_of
        self.count = int(group_of.max()) + 1
        self.least_cost_s = least_cost_s
        self.root: list[int] = []
        self.cost_s: list[float] = np.bincount(group_of, cost_s).tolist()
        self.taken_s = [0.0] * self.count
        self.class_of = self._of_groups(classes)
        self.label_of = self._of_groups(graph.group)

    def _of_groups(self, values: NDArray[Any]) -> list[int]:
        """Return the value of each group, which all of its ops share."""
        of_groups = np.empty(self.count, np.int64)
        of_groups[self.group_of] = values
        whole: list[int] = of_groups.tolist()
        return whole

    def merge(self, *, downwards: bool) -> None:
        """Run one pass: merge into the group read from (downwards), or into the reader."""
        quotient = Quotient.of(self.graph, self.group_of)
        into, back = quotient.only_predecessor().tolist(), quotient.only_successor().tolist()
        if not downwards:
            into, back = back, into
        self.root = list(range(self.count))
        hosts = [(back[host] != g, g, host) for g, host in enumerate(into) if host >= 0]
        for is_side, g, host in sorted(hosts):  # chains first: sides are then absorbed whole
            self._try(root_of(self.root, g), root_of(self.root, host), is_chain=not is_side)
        kept, number = np.unique([root_of(self.root, g) for g in self.root], return_inverse=True)
        self.group_of, self.count = number[self.group_of], len(kept)
        self.cost_s, self.taken_s = ([a[g] for g in kept] for a in (self.cost_s, self.taken_s))
        self.class_of, self.label_of = (
            [a[g] for g in kept] for a in (self.class_of, self.label_of)
        )

    def _try(self, guest: int, host: int, *, is_chain: bool) -> None:
        label, other = self.label_of[guest], self.label_of[host]
        if self.class_of[guest] != self.class_of[host] or (
            label != other and min(label, other) >= 0
        ):
            return
        cost_s, taken_s = self.cost_s[guest], max(self.taken_s[guest], self.taken_s[host])
        if label != other or label < 0:
            if not is_chain:
                taken_s = max(taken_s, self.taken_s[host] + cost_s)
            if (min(cost_s, self.cost_s[host]) if is_chain else taken_s) > self.least_cost_s:
                return
        self.root[guest] = host
        self.cost_s[host] += cost_s
        self.taken_s[host] = taken_s
        self.label_of[host] = max(label, other)


JUMP: Final = -1
"""Bond between consecutive groups without an edge, where the order jumps to another branch."""
HALVINGS: Final = 30
SLACK: Final = tuple(np.linspace(1.0, 1.5, 11).tolist())
"""Multiples of the lowest possible weight limit that are tried for the sake of better cuts."""


def cut(
    graph: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    weight: NDArray[np.float64],
    most: int,
) -> NDArray[np.int64] | None:
    """Return the groups of all ops, (N,), at most ``most`` of about the same weight.

    The result is None if the classes need more groups. The topological order follows one branch
    after another and stays within a class as long as it can. A piece of it holds groups of one
    class and ends where the order jumps to another branch or, if there is no such place, where the
    fewest bytes pass. All edges between pieces point forward in the order, so no cycle can arise.

    ``group_of`` (N,) has no cycles, and all ops of a group are of one of the ``classes`` (N,).
    ``weight`` (N,) is finite and not negative, ``most`` at least 1.
    """
    order, pieces = _sequence(graph, group_of, classes, weight)
    if len(pieces.ends) > most:
        return None
    return _cut_at(pieces.best_cuts(most), order, group_of)


def cut_by_weight(
    graph: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    weight: NDArray[np.float64],
    heaviest: float,
) -> NDArray[np.int64]:
    """Return the groups of all ops, (N,), that weigh at most ``heaviest``, in one pass.

    As :func:`cut`, however many groups there are. What is heavier alone remains a group.
    """
    order, pieces = _sequence(graph, group_of, classes, weight)
    cuts = pieces.cuts(heaviest, len(order))
    assert cuts is not None, "there are no more pieces than groups"
    return _cut_at(cuts, order, group_of)


def _sequence(
    graph: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    weight: NDArray[np.float64],
) -> tuple[NDArray[np.int64], _Pieces]:
    """Return the groups in the order in which they are cut, and what is cut."""
    quotient = Quotient.of(graph, group_of)
    class_of = np.empty(quotient.count, np.int64)
    class_of[group_of] = classes
    order = quotient.depth_first(class_of)
    heavy = np.bincount(group_of, weight)[order].astype(np.float64)
    ends = [*(np.flatnonzero(np.diff(class_of[order])) + 1).tolist(), quotient.count]
    return order, _Pieces(heavy, ends, _bonds(graph, group_of, order))


def _cut_at(
    cuts: Sequence[int], order: NDArray[np.int64], group_of: NDArray[np.int64]
) -> NDArray[np.int64]:
    piece = np.empty(len(order), np.int64)
    piece[order] = np.searchsorted(np.array(cuts), np.arange(len(order)), side="right")
    return renumbered(piece[group_of])


class _Pieces:
    """Cuts a sequence of G weights into pieces that weigh no more than a limit.

    ``ends`` are the mandatory cuts, the last is G; ``bond`` (G+1,) is the number of bytes that pass
    before each of the G groups, or JUMP.
    """

    def __init__(
        self, weight: NDArray[np.float64], ends: Sequence[int], bond: NDArray[np.int64]
    ) -> None:
        self.before = [0.0, *np.cumsum(weight).tolist()]
        self.ends = ends
        self.bond = bond

    def best_cuts(self, most: int) -> list[int]:
        """Return the ends of at most ``most`` pieces, most of them whole branches.

        Bisects for the lowest weight limit with few enough pieces; of that limit and some larger
        ones, takes the cuts with the smallest share in the middle of a branch.
        """
        low, high = 0.0, self.before[-1]
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.cuts(middle, most) is None:
                low = middle
            else:
                high = middle
        tried = [cuts for more in SLACK if (cuts := self.cuts(more * high, most)) is not None]
        # Cutting at the ends alone is always possible, even if rounding hides it.
        return min(tried or [list(self.ends)], key=self._share_within_branches)

    def _share_within_branches(self, cuts: list[int]) -> float:
        inner = self.bond[cuts[:-1]]
        return float((inner != JUMP).mean()) if len(inner) else 0.0

    def cuts(self, heaviest: float, most: int) -> list[int] | None:
        """Return where pieces end, the last at G; None if there are more than ``most``.

        Only a piece of one group may weigh more than ``heaviest``. A piece ends with the last
        branch that ends after half of that weight; if none does, at the weakest bond after four
        fifths.
        """
        cuts: list[int] = []
        start = 0
        for end in self.ends:
            while start < end:
                if len(cuts) == most:
                    return None
                full = self.before[start] + heaviest
                last = max(bisect_right(self.before, full) - 1, start + 1)
                if last < end:
                    half = self._place(start, heaviest / 2, last)
                    if self.bond[half : last + 1].min() != JUMP:
                        half = self._place(start, heaviest * 4 / 5, last)
                    last -= int(self.bond[half : last + 1][::-1].argmin())
                start = min(last, end)
                cuts.append(start)
        return cuts

    def _place(self, start: int, weight: float, last: int) -> int:
        return min(max(bisect_left(self.before, self.before[start] + weight), start + 1), last)


def _bonds(
    graph: GraphArrays, group_of: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the bytes from each group in the order to the next, (G+1,); JUMP without an edge.

    Entry p belongs to a cut between p-1 and p; the entries at both ends are unused.
    """
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    source = position[group_of[edge_sources(graph)]]
    target = position[group_of[graph.successors]]
    neighbours = target == source + 1
    bond = np.full(len(order) + 1, JUMP, np.int64)
    bond[target[neighbours]] = 0
    np.add.at(bond, target[neighbours], graph.edge_bytes[neighbours])
    return bond
