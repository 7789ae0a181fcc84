"""Longest paths to and from every op: what list schedulers order ops by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled


@compiled
def levels(
    topological: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    edge: NDArray[np.float64],
    cost: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Top and bottom level of N ops, in the unit of ``cost`` (N,) and ``edge`` (E,, by target).

    Returns:
        Longest path from a source up to each op, without it, and from each op to the end, with it.
    """
    count = len(cost)
    head = np.zeros(count)
    tail = cost.copy()
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
    return head, tail
