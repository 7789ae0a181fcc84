"""Groups of ops that are placed as one: by co-location, then by heavy edges.

Groups may form cycles: their members share a device, but need not run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from graphs.coarsen.merging import edge_sources

ROOM: Final = 1.5
"""Initial limit of a group's cost relative to its equal share; doubled until few groups are
left."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """G groups of the N ops of a problem, numbered by their topologically first member."""

    problem: Problem
    group_of: NDArray[np.int64]  # (N,)

    def __len__(self) -> int:
        """Return G."""
        return int(self.group_of.max()) + 1

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Devices where all members are allowed, (G, D); every group has one."""
        allowed = np.ones((len(self), self.problem.device_count), np.bool_)
        np.logical_and.at(allowed, self.group_of, self.problem.allowed)
        return allowed

    @cached_property
    def cost_ns(self) -> NDArray[np.int64]:
        """Sum of the members' costs on each device, (G, D), 0 where a member is not allowed."""
        cost = np.zeros((len(self), self.problem.device_count), np.int64)
        np.add.at(cost, self.group_of, self.problem.cost_ns)
        return np.where(self.allowed, cost, 0)

    def expand(self, devices: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return devices of ops (..., N) from those of groups (..., G)."""
        return np.asarray(devices[..., self.group_of], np.int32)


def units(problem: Problem) -> Grouping:
    """Return the co-location groups, with every other op as a group of its own."""
    group = problem.graph.group.astype(np.int64)
    alone = group < 0
    group[alone] = group.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    return Grouping(problem, _numbered(problem, group))


def at_most(problem: Problem, most: int) -> Grouping:
    """Return at most ``most`` groups if pins permit, merging along the heaviest edges first.

    A group stays below a multiple of its equal share of the total cost. Groups without edges
    between them are merged with the next in topological order.
    """
    fine = units(problem)
    if len(fine) <= most:
        return fine
    union = _Union(fine)
    heavy = np.argsort(-problem.graph.edge_bytes, kind="stable")
    source = fine.group_of[edge_sources(problem.graph)[heavy]].tolist()
    target = fine.group_of[problem.graph.successors[heavy]].tolist()
    limit = ROOM * sum(union.cost) / most
    while union.count > most:
        whole = limit >= ROOM * sum(union.cost)
        for a, b in zip(source, target, strict=True):
            if union.count > most:
                union.unite(a, b, limit)
        if whole:
            break
        limit *= 2.0
    for a in range(1, len(fine)):
        if union.count > most:
            union.unite(a - 1, a, np.inf)
    roots = np.array([union.root(g) for g in range(len(fine))])
    return Grouping(problem, _numbered(problem, roots[fine.group_of]))


class _Union:
    """Disjoint sets of groups, with their costs and allowed devices."""

    def __init__(self, fine: Grouping) -> None:
        self.count = len(fine)
        self.parent = list(range(self.count))
        self.allowed = fine.allowed.copy()
        runs = fine.allowed.sum(axis=1)
        self.cost: list[float] = (fine.cost_ns.sum(axis=1) / runs).tolist()

    def root(self, g: int) -> int:
        while self.parent[g] != g:
            self.parent[g] = self.parent[self.parent[g]]
            g = self.parent[g]
        return g

    def unite(self, a: int, b: int, limit: float) -> None:
        a, b = self.root(a), self.root(b)
        common = self.allowed[a] & self.allowed[b]
        if a == b or self.cost[a] + self.cost[b] > limit or not common.any():
            return
        self.parent[b] = a
        self.cost[a] += self.cost[b]
        self.cost[b] = 0.0
        self.allowed[a] = common
        self.count -= 1


def _numbered(problem: Problem, group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Renumber groups in topological order of their first members."""
    order = problem.graph.topological
    _, first, inverse = np.unique(group[order], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered = np.empty(len(group), np.int64)
    numbered[order] = rank[inverse]
    return numbered
