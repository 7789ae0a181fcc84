"""Lower bounds of a step: what no placement on these devices can beat."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem

ROUNDS: Final = 200
WEIGHT_SUM: Final = 1 << 16
LARGEST_REACH: Final = 4096
"""Graphs of more ops go without the bound over ancestors, which takes N * N bytes."""


def lower_bound_ns(problem: Problem) -> int:
    """Nanoseconds that every step takes at least, whatever the placement and the order.

    The largest of: the critical path with every op on its fastest device and no transfers; the
    work of all ops over all devices; and, for every op, what must come before it, itself and what
    must come after it, where before and after are each a path or the work of all ancestors or
    descendants. Work is bounded by a feasible point of the dual of R||Cmax (Lenstra, Shmoys and
    Tardos, 1990): for weights w of the devices that add up to 1, sum_i min_d w_d cost_id. It is
    kept in integers, so the bound holds to the last digit.
    """
    shares = _shares(problem)
    own = problem.cheapest_ns().tolist()
    head, tail = _paths(problem, own)
    work = -(-sum(shares.tolist()) // WEIGHT_SUM)
    if problem.op_count <= LARGEST_REACH:
        before, after = _work_around(problem, shares)
        head = [max(pair) for pair in zip(head, before, strict=True)]
        tail = [max(pair) for pair in zip(tail, after, strict=True)]
    through = max(h + o + t for h, o, t in zip(head, own, tail, strict=True))
    return int(max(work, through))


def _paths(problem: Problem, own: list[int]) -> tuple[list[int], list[int]]:
    """Longest path of costs before each op, and after it."""
    graph = problem.graph
    successor_start, successors = graph.successor_start.tolist(), graph.successors.tolist()
    head, tail = [0] * len(own), [0] * len(own)
    order = graph.topological.tolist()
    for i in order:
        for v in successors[successor_start[i] : successor_start[i + 1]]:
            head[v] = max(head[v], head[i] + own[i])
    for i in reversed(order):
        for v in successors[successor_start[i] : successor_start[i + 1]]:
            tail[i] = max(tail[i], tail[v] + own[v])
    return head, tail


def _shares(problem: Problem) -> NDArray[np.int64]:
    """WEIGHT_SUM times the least weighted cost of every op, (N,), for the best weights found.

    The weights are found by giving more to the devices that are overloaded where every op goes to
    the device of its least weighted cost; whatever they are, the bound holds.
    """
    cost = np.where(problem.allowed, problem.cost_ns.astype(np.float64), np.inf)
    count = problem.device_count
    weight = np.full(count, 1 / count)
    best, best_weight = -1.0, weight
    for k in range(ROUNDS):
        weighted = cost * np.maximum(weight, 1e-12)
        choice = weighted.argmin(axis=1)
        value = float(weighted.min(axis=1).sum())
        if value > best:
            best, best_weight = value, weight
        load = np.bincount(choice, cost[np.arange(len(cost)), choice], minlength=count)
        step = 1.0 / (k + 1) ** 0.5
        weight = weight * np.exp(step * (load / max(load.max(), 1.0) - 1))
        weight = weight / weight.sum()
    whole = np.floor(best_weight * WEIGHT_SUM).astype(np.int64)
    whole[whole.argmax()] += WEIGHT_SUM - whole.sum()
    # Costs are below 2**39, so that a product stays below 2**55.
    never = np.iinfo(np.int64).max
    return np.asarray(
        np.where(problem.allowed, problem.cost_ns * whole, never).min(axis=1), np.int64
    )


def _work_around(problem: Problem, shares: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Least nanoseconds for all ancestors of each op, and for all descendants."""
    graph, count = problem.graph, problem.op_count
    start, predecessors = graph.predecessor_start.tolist(), graph.predecessors
    ancestor = np.zeros((count, count), np.bool_)  # [i, u]: u is an ancestor of i
    for i in graph.topological.tolist():
        direct = predecessors[start[i] : start[i + 1]]
        if len(direct):
            ancestor[i] = ancestor[direct].any(axis=0)
            ancestor[i, direct] = True
    # Rounded down to what float sums of 2**12 terms represent exactly; a bound stays a bound.
    whole = (shares // WEIGHT_SUM).astype(np.float64)
    before, after = ancestor @ whole, whole @ ancestor
    return before.astype(np.int64).tolist(), after.astype(np.int64).tolist()
