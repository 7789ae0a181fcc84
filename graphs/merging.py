"""Merging ops into groups such that the graph between groups stays acyclic.

Each function maps ``group_of`` (N,), the group of every op, to one with as many groups or fewer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from graphs.graph import GraphArrays
from graphs.quotient import Quotient, renumbered

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
            self._try(self._find(g), self._find(host), is_chain=not is_side)
        kept, number = np.unique([self._find(g) for g in self.root], return_inverse=True)
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

    def _find(self, g: int) -> int:
        while self.root[g] != g:
            self.root[g] = self.root[self.root[g]]
            g = self.root[g]
        return g
