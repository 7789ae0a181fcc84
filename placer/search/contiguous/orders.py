"""Linear orders of ops in which contiguous parts make good pipeline stages.

No order is best for all graphs: each one cuts few edges where another cuts many.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

import numpy as np

from envs.problem import Ints, Problem
from graphs.graph import PHASES, GraphArrays

BACKWARD: Final = PHASES.index("backward")
MOST_OPS_IN_NARROW_ORDER: Final = 5000
"""Computing the narrow order takes too long for larger graphs."""


def linear_orders(problem: Problem) -> list[Ints]:
    """Return distinct orders of all ops, (N,) each; the first one is the topological order."""
    graph = problem.graph
    orders = [
        graph.topological,
        depth_first_order(graph),
        folded_order(graph),
        breadth_first_order(graph),
    ]
    if problem.op_count <= MOST_OPS_IN_NARROW_ORDER:
        orders.append(narrow_order(graph))
    return list({order.tobytes(): order for order in orders}.values())


def narrow_order(graph: GraphArrays) -> Ints:
    """Return all ops (N,) in a topological order that keeps few outputs in use at a time.

    Greedy: always the op that frees most outputs; among equals, the one that became ready last.
    """
    unread = np.diff(graph.successor_start).tolist()
    missing = np.diff(graph.predecessor_start).tolist()
    reads = _lists(graph.predecessor_start, graph.predecessors)
    readers = _lists(graph.successor_start, graph.successors)
    since: dict[int, tuple[int, int]] = {}  # of ready ops: when they became so, and a number
    queue: list[tuple[int, tuple[int, int], int]] = []
    order: list[int] = []

    def put(i: int) -> None:
        growth = bool(readers[i]) - sum(unread[u] == 1 for u in reads[i])
        heappush(queue, (growth, since[i], i))  # an earlier entry of i, if any, is no smaller

    def make_ready(ops: Iterable[int]) -> None:
        for number, i in enumerate(ops):
            since[i] = -len(order), number
            put(i)

    make_ready(i for i in graph.topological.tolist() if not missing[i])
    while queue:
        _, _, chosen = heappop(queue)
        if since.pop(chosen, None) is None:
            continue
        order.append(chosen)
        for u in reads[chosen]:
            unread[u] -= 1
            if unread[u] == 1:
                for i in readers[u]:
                    if i in since:
                        put(i)
        ready = []
        for v in readers[chosen]:
            missing[v] -= 1
            if not missing[v]:
                ready.append(v)
        make_ready(ready)
    return np.array(order, np.int32)


def depth_first_order(graph: GraphArrays) -> Ints:
    """Return all ops (N,) in a topological order with every op right after what only it reads.

    The inputs of an op come deepest first, so that constants and weights come last, just before
    their reader.
    """
    reads = _lists(graph.predecessor_start, graph.predecessors)
    readers = np.diff(graph.successor_start).tolist()
    topological = graph.topological.tolist()
    depth = [0] * len(reads)
    for i in topological:
        depth[i] = max((depth[u] + 1 for u in reads[i]), default=0)
    order: list[int] = []
    opened = [False] * len(reads)
    for sink in (i for i in topological if not readers[i]):
        opened[sink] = True
        stack = [(sink, iter(sorted(reads[sink], key=lambda u: -depth[u])))]
        while stack:
            op, inputs = stack[-1]
            unread = next((u for u in inputs if not opened[u]), None)
            if unread is None:
                order.append(op)
                stack.pop()
            else:
                opened[unread] = True
                stack.append((unread, iter(sorted(reads[unread], key=lambda u: -depth[u]))))
    return np.array(order, np.int32)


def folded_order(graph: GraphArrays) -> Ints:
    """Return all ops (N,) depth first, but each backward op with the forward ops that it reads.

    A backward op that reads none comes with the first backward op that it reads. Without backward
    ops it is the depth-first order.
    """
    order = depth_first_order(graph)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    is_backward = graph.phase == BACKWARD
    start, predecessors = graph.predecessor_start, graph.predecessors
    for i in order.tolist() if is_backward.any() else ():
        reads = predecessors[start[i] : start[i + 1]]
        forward = reads[~is_backward[reads]]
        if is_backward[i] and len(forward):
            place[i] = place[forward].max()
        elif is_backward[i] and len(reads):
            place[i] = place[reads].min()
    return order[np.argsort(place[order], kind="stable")]


def breadth_first_order(graph: GraphArrays) -> Ints:
    """Return all ops (N,) by distance from an end of the graph, whatever the direction of edges.

    The order of Cuthill and McKee (1969): few ops lie between the ends of an edge. A backward op is
    near its forward op, as they share what was saved; the order is then not topological.
    """
    reads = _lists(graph.predecessor_start, graph.predecessors)
    readers = _lists(graph.successor_start, graph.successors)
    near = [a + b for a, b in zip(reads, readers, strict=True)]
    degree = [len(each) for each in near]
    for each in near:
        each.sort(key=degree.__getitem__)
    reached = [False] * len(near)
    order: list[int] = []
    for first in graph.topological.tolist():
        if not reached[first]:
            part = _by_distance(near, _by_distance(near, first)[-1])
            for i in part:
                reached[i] = True
            order += part
    return np.array(order, np.int32)


def _by_distance(near: list[list[int]], first: int) -> list[int]:
    """Return all ops that are joined with the first one, by distance."""
    order, reached = [first], {first}
    for i in order:  # grows while it is read
        for j in near[i]:
            if j not in reached:
                reached.add(j)
                order.append(j)
    return order


def _lists(start: Ints, values: Ints) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in pairwise(start.tolist())]
