"""Contiguous parts of a topological order, one per device, that minimize the slowest part.

The time of a part is the cost of its ops plus its incoming and outgoing transfers, as counted by
:mod:`envs.simulator.max_load`. It depends only on the two ends of the part, so the best borders
follow by dynamic programming, as for pipelines of layers (PipeDream, arXiv 1806.03377).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from envs.compiled import compiled
from envs.problem import Bools, Ints, Longs, Problem
from envs.simulator.max_load import HOST_KIND, least_send_ns
from graphs.coarsen.merging import edge_sources
from graphs.graph import GraphArrays
from placer.search.grouping import spread

MOST_STEPS: Final = 20_000_000
"""Maximum number of steps of the dynamic programming; longer orders are cut at fewer, evenly spaced
places."""
NEVER_NS: Final = 1 << 62


def narrow_order(graph: GraphArrays) -> Ints:
    """Return all ops (N,) in a topological order that keeps few outputs in use at a time.

    Greedy: always the op that frees most outputs; among equals, the one that became ready last.
    """
    unread = np.diff(graph.successor_start).tolist()
    missing = np.diff(graph.predecessor_start).tolist()
    reads = _lists(graph.predecessor_start, graph.predecessors)
    readers = _lists(graph.successor_start, graph.successors)
    since = {i: -1 for i in graph.topological.tolist() if not missing[i]}
    order: list[int] = []

    def growth(i: int) -> tuple[int, int]:
        return bool(readers[i]) - sum(unread[u] == 1 for u in reads[i]), -since[i]

    while since:
        chosen = min(since, key=growth)
        del since[chosen]
        order.append(chosen)
        for u in reads[chosen]:
            unread[u] -= 1
        for v in readers[chosen]:
            missing[v] -= 1
            if not missing[v]:
                since[v] = len(order)
    return np.array(order, np.int32)


def _lists(start: Ints, values: Ints) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in pairwise(start.tolist())]


def pipeline_parts(
    problem: Problem,
    order: Ints,
    device_order: Sequence[int] | None = None,
    *,
    keep_outputs: bool = True,
) -> Ints:
    """Return devices (N,) of the best parts of a topological order (N,); parts may be empty.

    The first part is on the first device of ``device_order``. Transfers count as on the best link,
    and co-location is enforced only at the end: exact if links are equal and there are no groups. A
    part needs memory for its parameters and, with ``keep_outputs``, for all outputs and workspaces.
    If no parts fit, memory is ignored.
    """
    graph, count = problem.graph, problem.op_count
    devices = np.arange(problem.device_count) if device_order is None else np.array(device_order)
    starts = max(MOST_STEPS // max(count * len(devices), 1), 4 * len(devices))
    borders = np.unique(np.linspace(0, count, min(count, starts) + 1).astype(np.int32))
    position = np.empty(count, np.int32)
    position[order] = np.arange(count)
    last_reader = position.copy()
    np.maximum.at(last_reader, edge_sources(graph), position[graph.successors])
    size = graph.resident_bytes.astype(np.int64)
    if keep_outputs:
        size = size + graph.output_bytes + graph.workspace_bytes
    pays = np.array([problem.cluster.devices[d].kind != HOST_KIND for d in devices], np.bool_)
    wish = np.zeros(count, np.int64)
    for memory_bytes in (problem.memory_bytes[devices], np.full(len(devices), NEVER_NS)):
        ends = _best_ends(
            np.where(problem.allowed, problem.cost_ns, -1)[:, devices].copy(),
            least_send_ns(problem),
            size,
            memory_bytes.astype(np.int64),
            pays,
            np.array(order, np.int32),
            position,
            last_reader,
            graph.predecessor_start.copy(),
            graph.predecessors.copy(),
            borders,
        )
        if ends[-1] == count:
            wish[order] = devices[np.searchsorted(ends, np.arange(count), side="right")]
            break
    return spread(problem, wish)


@compiled
def _best_ends(
    cost_ns: Longs,
    send_ns: Longs,
    size_bytes: Longs,
    memory_bytes: Longs,
    pays: Bools,
    order: Ints,
    position: Ints,
    last_reader: Ints,
    read_start: Ints,
    reads: Ints,
    borders: Ints,
) -> Longs:
    """Return the end of each device's part, (D,), or all -1 if there are no such parts."""
    places, devices = len(borders), len(memory_bytes)
    best = np.full((devices + 1, places), NEVER_NS, np.int64)
    chosen = np.full((devices + 1, places), -1, np.int32)
    best[0, 0] = 0
    received = np.full(len(order), -1, np.int64)
    for d in range(devices):
        for a in range(places):
            so_far = best[d, a]
            if so_far >= best[d + 1, places - 1]:
                continue
            if so_far < best[d + 1, a]:
                best[d + 1, a], chosen[d + 1, a] = so_far, a
            kept, sent, used = 0, 0, 0
            for b in range(a + 1, places):
                fits = True
                for at in range(borders[b - 1], borders[b]):
                    i = order[at]
                    fits = fits and cost_ns[i, d] >= 0
                    kept += cost_ns[i, d]
                    used += size_bytes[i]
                    if pays[d] and last_reader[i] > at:
                        sent += send_ns[i]
                    for k in range(read_start[i], read_start[i + 1]):
                        u = reads[k]
                        if not pays[d]:
                            continue
                        if position[u] >= borders[a]:
                            sent -= send_ns[u] if last_reader[u] == at else 0
                        elif received[u] != d * places + a:
                            received[u] = d * places + a
                            kept += send_ns[u]
                if not fits or used > memory_bytes[d] or kept >= best[d + 1, places - 1]:
                    break
                load = max(so_far, kept + sent)
                if load < best[d + 1, b]:
                    best[d + 1, b], chosen[d + 1, b] = load, a
    ends = np.full(devices, -1, np.int64)
    if best[devices, places - 1] < NEVER_NS:
        at = places - 1
        for d in range(devices, 0, -1):
            ends[d - 1] = borders[at]
            at = chosen[d, at]
    return ends
