"""Groups of ops that are placed as one: by co-location, or merged further.

Groups may form cycles: their members share a device, but need not run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from envs.problem import Bools, Ints, Longs, Problem


@dataclass(frozen=True, eq=False)
class Grouping:
    """G groups of the N ops of a problem, numbered by their topologically first member."""

    problem: Problem
    group_of: Longs  # (N,)

    def __len__(self) -> int:
        """Return G."""
        return int(self.group_of.max()) + 1

    @cached_property
    def allowed(self) -> Bools:
        """Devices where all members are allowed, (G, D); every group has one."""
        allowed = np.ones((len(self), self.problem.device_count), np.bool_)
        np.logical_and.at(allowed, self.group_of, self.problem.allowed)
        return allowed

    @cached_property
    def cost_ns(self) -> Longs:
        """Sum of the members' costs on each device, (G, D), 0 where a member is not allowed."""
        cost = np.zeros((len(self), self.problem.device_count), np.int64)
        np.add.at(cost, self.group_of, self.problem.cost_ns)
        return np.where(self.allowed, cost, 0)

    def expand(self, devices: NDArray[np.integer]) -> Ints:
        """Return devices of ops (..., N) from those of groups (..., G)."""
        return np.asarray(devices[..., self.group_of], np.int32)


def units(problem: Problem) -> Grouping:
    """Return the co-location groups, with every other op as a group of its own."""
    group = problem.graph.group.astype(np.int64)
    alone = group < 0
    group[alone] = group.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    return Grouping(problem, numbered(problem, group))


def numbered(problem: Problem, group: Longs) -> Longs:
    """Renumber groups in topological order of their first members."""
    order = problem.graph.topological
    _, first, inverse = np.unique(group[order], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered = np.empty(len(group), np.int64)
    numbered[order] = rank[inverse]
    return numbered


def spread(problem: Problem, wish: Longs) -> Ints:
    """Give each op the device of its ``wish`` (N,), or the cheapest allowed one.

    A group goes where its topologically first member wishes; ``wish`` is updated in place.
    """
    order = problem.graph.topological
    group = problem.graph.group[order]
    cost = np.array(problem.cost_ns)
    grouped = group >= 0
    if grouped.any():
        first = np.unique(group[grouped], return_index=True)[1]
        wish[order[grouped]] = wish[order[grouped][first]][group[grouped]]
        total = np.zeros((len(first), problem.device_count), np.int64)
        np.add.at(total, group[grouped], cost[order[grouped]])
        cost[order[grouped]] = total[group[grouped]]
    cheapest = np.where(problem.allowed, cost, np.iinfo(np.int64).max).argmin(axis=1)
    fits = problem.allowed[np.arange(problem.op_count), wish]
    return np.where(fits, wish, cheapest).astype(np.int32)
