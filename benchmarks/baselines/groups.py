"""Groups of ops along heavy edges, and the evaluation of placements of groups."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from graphs.coarsen.merging import edge_sources
from placer.search.grouping import Grouping, numbered, units
from placer.search.sampling import BudgetedEvaluator

ROOM: Final = 1.5
"""Initial limit of a group's cost relative to its equal share; doubled until few groups are
left."""


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
    return Grouping(problem, numbered(problem, roots[fine.group_of]))


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


def affordable(budgeted: BudgetedEvaluator, most: int) -> int:
    """Return how many of ``most`` evaluations the budget has left, at least 1."""
    left = budgeted.meter.left()
    return most if left is None else max(min(most, left), 1)


def costs_of(budgeted: BudgetedEvaluator, plans: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return costs of placements (B, N) by upward rank; fewer than B if the budget ends."""
    by_level = budgeted.evaluator.scheduling.bottom_level
    costs: list[int] = []
    for devices in plans:
        if budgeted.over():
            break
        costs.append(budgeted.evaluate(devices, by_level))
    return np.array(costs, np.int64)
