"""Topological order of the ops of a graph, or the cycle that prevents it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import networkx as nx


def topological_order(graph: nx.DiGraph[str]) -> list[str]:
    """Return all ops in topological order; of those that could come next, the one added first.

    Raises:
        ValueError: the graph has a cycle (the message shows one).
    """
    ids = list(graph)
    index = {op_id: i for i, op_id in enumerate(ids)}
    readers = [[index[op_id] for op_id in reading] for _, reading in graph.adjacency()]
    order = _order(readers)
    if len(order) < len(ids):
        cycle = [ids[i] for i in _cycle(readers, order)]
        shown = " -> ".join([*cycle[:6], "..."] if len(cycle) > 6 else [*cycle, cycle[0]])
        raise ValueError(f"the graph has a cycle of {len(cycle)} ops: {shown}")
    return [ids[i] for i in order]


def _order(readers: Sequence[Sequence[int]]) -> list[int]:
    """Return op indices in topological order, low ones first, without ops on or behind a cycle."""
    missing = [0] * len(readers)
    for reading in readers:
        for i in reading:
            missing[i] += 1
    ready = [i for i, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        done = heappop(ready)
        order.append(done)
        for i in readers[done]:
            missing[i] -= 1
            if not missing[i]:
                heappush(ready, i)
    return order


def _cycle(readers: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Return a cycle of ops that the order lacks, each read by the next, lowest index first."""
    left = set(range(len(readers))).difference(order)
    # Each of them waits for another, so that going back long enough ends on a cycle.
    source_of = {i: source for source in sorted(left, reverse=True) for i in readers[source]}
    seen: dict[int, int] = {}
    at = min(left)
    while at not in seen:
        seen[at] = len(seen)
        at = source_of[at]
    cycle = list(seen)[seen[at] :][::-1]
    lowest = cycle.index(min(cycle))
    return [*cycle[lowest:], *cycle[:lowest]]
