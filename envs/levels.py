"""Longest paths to and from every op, the ranks that list schedulers order ops by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing


def levels(
    topological: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    edge: NDArray[np.float64],
    cost: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return top and bottom levels of N ops, in the unit of ``cost`` (N,) and ``edge`` (E,).

    ``edge`` is ordered by target. The top level is the longest path from a source to the op,
    without the op; the bottom level (upward rank) is the longest path from the op to the end, with
    it.
    """
    head, tail = np.zeros(len(cost)), cost.copy()
    _fill_levels(topological, predecessor_start, predecessors, edge, cost, head, tail)
    return head, tail


@compiled_borrowing
def _fill_levels(
    topological: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    edge: NDArray[np.float64],
    cost: NDArray[np.float64],
    head: NDArray[np.float64],
    tail: NDArray[np.float64],
) -> None:
    # Fills ``head`` (N,), initially 0, and ``tail`` (N,), initially ``cost``.
    count = len(cost)
    for position in range(count):
        v = topological[position]
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
            head[v] = max(head[v], head[u] + cost[u] + edge[e])
    for position in range(count - 1, -1, -1):
        v = topological[position]
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
            tail[u] = max(tail[u], cost[u] + edge[e] + tail[v])
