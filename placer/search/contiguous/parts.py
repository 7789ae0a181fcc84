"""Contiguous parts of a linear order of ops, one per device, that minimize the slowest part.

The time of a part is the cost of its ops plus its incoming and outgoing transfers, as counted by
:mod:`envs.simulator.max_load`. It depends only on the two ends of the part, so the best borders
follow by dynamic programming, as for pipelines of layers (PipeDream, arXiv 1806.03377). The order
need not be topological: a load does not depend on the order of ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, permutations
from typing import Final

import numpy as np

from envs.compiled import compiled
from envs.problem import Bools, Ints, Longs, Problem
from envs.simulator.max_load import HOST_KIND, least_send_ns
from graphs.coarsen.merging import edge_sources
from placer.search.grouping import spread, units

MOST_STEPS: Final = 20_000_000
"""Maximum number of steps of the dynamic programming; longer orders are cut at fewer, evenly spaced
places."""
MOST_PERMUTED: Final = 6
"""The most devices of which orders are listed."""
MOST_DEVICE_ORDERS: Final = 24
NEVER_NS: Final = 1 << 62


def device_orders(problem: Problem) -> list[tuple[int, ...]]:
    """Return orders of the devices (D,), one for each order of unequal ones, if they are few."""
    count = problem.device_count
    natural = tuple(range(count))
    _, column = _classes(problem, np.arange(count))
    if count > MOST_PERMUTED:
        both = {tuple(column[list(order)]): order for order in (natural[::-1], natural)}
        return list(both.values())[::-1]
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(natural):
        distinct.setdefault(tuple(column[list(order)].tolist()), order)
    return list(islice(distinct.values(), MOST_DEVICE_ORDERS))


def pipeline_parts(
    problem: Problem,
    order: Ints,
    device_order: Sequence[int] | None = None,
    *,
    keep_outputs: bool = True,
) -> Ints:
    """Return devices (N,) of the best parts of an order of all ops (N,); parts may be empty.

    See :func:`best_parts`. If no parts fit, memory is ignored.
    """
    for ignore_memory in (False, True):
        parts = best_parts(
            problem,
            order,
            device_order,
            keep_outputs=keep_outputs,
            ignore_memory=ignore_memory,
        )
        if parts is not None:
            return parts
    return spread(problem, np.zeros(problem.op_count, np.int64))


def best_parts(
    problem: Problem,
    order: Ints,
    device_order: Sequence[int] | None = None,
    *,
    keep_outputs: bool = True,
    ignore_memory: bool = False,
    below_ns: int = NEVER_NS,
    most_steps: int = MOST_STEPS,
) -> Ints | None:
    """Return devices (N,) of the best parts of an order, or None if none has a load below a limit.

    A co-location group comes as a whole where its first op is. The first part is on the first
    device of ``device_order``. Transfers count as on the best link: exact if links are equal. A
    part needs memory for its parameters and, with ``keep_outputs``, for all outputs and workspaces.
    """
    graph, count = problem.graph, problem.op_count
    devices = np.arange(problem.device_count) if device_order is None else np.array(device_order)
    first_of, column = _classes(problem, devices)
    order, ends = _groups_together(problem, order)
    position = np.empty(count, np.int32)
    position[order] = np.arange(count)
    first_reader, last_reader = np.full(count, count, np.int32), np.full(count, -1, np.int32)
    np.minimum.at(first_reader, edge_sources(graph), position[graph.successors])
    np.maximum.at(last_reader, edge_sources(graph), position[graph.successors])
    size = graph.resident_bytes.astype(np.int64)
    if keep_outputs:
        size = size + graph.output_bytes + graph.workspace_bytes
    cost_ns = np.where(problem.allowed, problem.cost_ns, -1)[:, first_of].copy()
    memory_bytes = problem.memory_bytes[first_of].astype(np.int64)
    if ignore_memory:
        memory_bytes[:] = NEVER_NS
    kinds = [problem.cluster.devices[d].kind for d in first_of.tolist()]
    last_ops = _best_ends(
        cost_ns,
        least_send_ns(problem),
        size,
        column,
        memory_bytes,
        np.array([kind != HOST_KIND for kind in kinds], np.bool_),
        order,
        position,
        first_reader,
        last_reader,
        graph.predecessor_start.copy(),
        graph.predecessors.copy(),
        _borders(ends, cost_ns, below_ns, most_steps),
        below_ns,
    )
    if last_ops[-1] != count:
        return None
    wish = np.empty(count, np.int64)
    wish[order] = devices[np.searchsorted(last_ops, np.arange(count), side="right")]
    return spread(problem, wish)


def _classes(problem: Problem, devices: Longs) -> tuple[Longs, Ints]:
    """Return a device of each class of equal ones, (C,), and the class of every device, (D,)."""
    numbers: dict[tuple[bytes, int, bool], int] = {}
    first_of, column = [], []
    for d in devices.tolist():
        cost = np.where(problem.allowed[:, d], problem.cost_ns[:, d], -1)
        is_host = problem.cluster.devices[d].kind == HOST_KIND
        key = (cost.tobytes(), int(problem.memory_bytes[d]), is_host)
        if key not in numbers:
            numbers[key] = len(numbers)
            first_of.append(d)
        column.append(numbers[key])
    return np.array(first_of, np.int64), np.array(column, np.int32)


def _groups_together(problem: Problem, order: Ints) -> tuple[Ints, Ints]:
    """Return an order with co-location groups as a whole, and where each group or op ends."""
    unit = units(problem).group_of[order]
    _, first, inverse = np.unique(unit, return_index=True, return_inverse=True)
    together = np.argsort(first[inverse], kind="stable")
    last = np.flatnonzero(np.diff(unit[together], append=-1))
    return order[together].astype(np.int32), (last + 1).astype(np.int32)


def _borders(ends: Ints, cost_ns: Longs, below_ns: int, most_steps: int) -> Ints:
    """Return where parts may begin or end: everywhere, unless that were too many steps.

    A step adds an op to a part that begins at a border; parts end when their ops cost too much.
    """
    whole_ns = float(np.maximum(cost_ns, 0).sum(dtype=np.float64)) / cost_ns.shape[1]
    share = min(below_ns / max(whole_ns, 1.0), 1.0)
    most = max(int(most_steps / max(share * cost_ns.size, 1.0)), 4 * cost_ns.shape[1], 64)
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(len(ends), most)).astype(np.int64))
    return np.concatenate([np.zeros(1, np.int32), ends[chosen]])


@compiled
def _best_ends(
    cost_ns: Longs,
    send_ns: Longs,
    size_bytes: Longs,
    column: Ints,
    memory_bytes: Longs,
    pays: Bools,
    order: Ints,
    position: Ints,
    first_reader: Ints,
    last_reader: Ints,
    read_start: Ints,
    reads: Ints,
    borders: Ints,
    below_ns: int,
) -> Longs:
    """Return the end of each device's part, (D,), or all -1 if there are no such parts.

    ``cost_ns`` (N, C), ``memory_bytes`` (C,) and ``pays`` (C,) are those of the classes of equal
    devices that ``column`` (D,) names. ``best[d, b]`` is the least largest load of the first d
    devices with all ops before border b. From every border a part grows op by op; ``kept`` is what
    it costs however far it grows, ``sent`` are the transfers that its next ops may spare.
    """
    places, devices = len(borders), len(column)
    best = np.full((devices + 1, places), NEVER_NS, np.int64)
    chosen = np.full((devices + 1, places), -1, np.int32)
    best[0, 0] = 0
    received = np.full(len(order), -1, np.int64)
    for a in range(places):
        for d in range(devices):
            if best[d, a] < best[d + 1, a]:
                best[d + 1, a], chosen[d + 1, a] = best[d, a], a
        for c in range(len(memory_bytes)):
            so_far = NEVER_NS
            for d in range(devices):
                if column[d] == c:
                    so_far = min(so_far, best[d, a])
            kept, sent, used = 0, 0, 0
            begin, part = borders[a], a * len(memory_bytes) + c
            for b in range(a + 1, places):
                fits = so_far < min(below_ns, best[devices, places - 1])
                if not fits:
                    break
                for at in range(borders[b - 1], borders[b]):
                    i = order[at]
                    fits = fits and cost_ns[i, c] >= 0
                    kept += cost_ns[i, c]
                    used += size_bytes[i]
                    if not pays[c]:
                        continue
                    if received[i] == part:
                        sent -= send_ns[i]
                    if first_reader[i] < begin:
                        kept += send_ns[i]
                    elif last_reader[i] > at:
                        sent += send_ns[i]
                    for k in range(read_start[i], read_start[i + 1]):
                        u = reads[k]
                        if begin <= position[u] <= at:
                            if last_reader[u] == at and first_reader[u] >= begin:
                                sent -= send_ns[u]
                        elif received[u] != part:
                            received[u] = part
                            if position[u] < begin:
                                kept += send_ns[u]
                            else:
                                sent += send_ns[u]
                most = min(below_ns, best[devices, places - 1])
                if not fits or used > memory_bytes[c] or kept >= most:
                    break
                load = kept + sent
                if load >= most:
                    continue
                for d in range(devices):
                    if column[d] == c and max(best[d, a], load) < best[d + 1, b]:
                        best[d + 1, b], chosen[d + 1, b] = max(best[d, a], load), a
    ends = np.full(devices, -1, np.int64)
    if best[devices, places - 1] < below_ns:
        at = places - 1
        for d in range(devices, 0, -1):
            ends[d - 1] = borders[at]
            at = chosen[d, at]
    return ends
