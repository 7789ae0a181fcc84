"""The graph between groups of ops: distinct edges, cycles, and a depth-first topological order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush

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
