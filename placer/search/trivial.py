"""Placements that need no search: the baselines.

All respect the allowed devices of ops and keep a co-location group on one device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem


def single_device(problem: Problem, device: int) -> NDArray[np.int32]:
    """Place all ops on one device; ops that are not allowed there on their cheapest one."""
    return spread(problem, np.full(problem.op_count, device))


def layer_split(problem: Problem) -> NDArray[np.int32]:
    """Return contiguous parts in topological order, one per device, in proportion to its speed."""
    order = problem.graph.topological
    total = np.where(problem.allowed, problem.cost_ns, 0).sum(axis=1)
    cost = (total / problem.allowed.sum(axis=1))[order]
    runs = np.maximum(problem.allowed.sum(axis=0), 1)
    device_cost = np.where(problem.allowed, problem.cost_ns, 0).sum(axis=0) / runs
    speed = 1.0 / np.maximum(device_cost, 1.0)
    borders = np.cumsum(speed)[:-1] / speed.sum() * cost.sum()
    wish = np.empty(problem.op_count, np.int64)
    wish[order] = np.searchsorted(borders, np.cumsum(cost) - cost / 2.0, side="right")
    return spread(problem, wish)


def round_robin(problem: Problem) -> NDArray[np.int32]:
    """Assign ops in topological order to the devices in turn."""
    wish = np.empty(problem.op_count, np.int64)
    wish[problem.graph.topological] = np.arange(problem.op_count) % problem.device_count
    return spread(problem, wish)


def spread(problem: Problem, wish: NDArray[np.int64]) -> NDArray[np.int32]:
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
