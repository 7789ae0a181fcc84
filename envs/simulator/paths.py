"""Lower bounds on the time before and after ops: by paths, and by the work before and after."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline
from envs.problem import Bools, Floats, Ints, Longs, Problem, transfer_ns
from graphs.graph import GraphArrays

Bits = NDArray[np.uint64]

UNREACHABLE_NS: Final = 1 << 60
"""Stands for an impossible time; sums of a few such values stay within 63 bits."""
MOST_PAIRS: Final = 1 << 25
"""Most pairs of a gate and an op: 5,700 ops are all gates, of 50,000 ops 671 are."""
MOST_OPS: Final = 50_000
"""Largest graph (ops) with gates."""
_ONE: Final = np.uint64(1)


class Paths(NamedTuple):
    """Lower bounds in ns on the time before (head) and after (tail) each op on each device, (N, D).

    Values of ``UNREACHABLE_NS`` or more mean that no placement is allowed.
    """

    head_ns: Longs
    tail_ns: Longs


def paths_of(problem: Problem, work_ns: Longs | None = None) -> Paths:
    """Compute the paths of a problem, in time O(E * D * D), with equal links O(E * D).

    ``work_ns`` adds O(gates * N).

    A head is at least that of any input, its cost and its transfer, with the input on the device
    that is best for this path: transfers count where no choice of devices avoids them at less cost.
    So it bounds the time before, whatever other paths do.

    ``work_ns`` (N,) is a share of every op: in t ns all devices together complete shares of t at
    most, see :func:`envs.simulator.bounds.pace_ns`. Of an op's ancestors, those with heads of r or
    more (on the device where it is least) start at r or later and end before the op starts. So it
    starts no earlier than at r plus their shares, for any r. Backwards the same holds for tails and
    descendants. Heads found in this way count further on: several bottlenecks in a row add up. This
    is the preemptive bound for release dates on parallel machines, applied to the ancestors of each
    op; of large graphs, to those of the ops with the most edges, the gates.
    """
    graph = problem.graph
    shape = (problem.op_count, problem.device_count)
    head, tail = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    _fill_longest(
        graph.topological.copy(),
        graph.predecessor_start.copy(),
        graph.predecessors.copy(),
        graph.edge_bytes[graph.predecessor_edge],
        np.where(problem.allowed, problem.cost_ns, UNREACHABLE_NS),
        problem.latency_s.copy(),
        problem.bandwidth_bytes_per_s.copy(),
        problem.connected.copy(),
        _equal_links(problem),
        np.zeros((problem.device_count, problem.device_count), np.int64),
        _work(graph, work_ns),
        head,
        tail,
    )
    return Paths(head_ns=head, tail_ns=tail)


def _equal_links(problem: Problem) -> bool:
    """Return whether all pairs of devices are joined by equal links."""
    apart = ~np.eye(problem.device_count, dtype=np.bool_)
    links = (problem.latency_s, problem.bandwidth_bytes_per_s)
    alike = all(len(np.unique(link[apart])) <= 1 for link in links)
    return alike and problem.device_count > 1 and bool(problem.connected.all())


@by_pointer
class _Work(NamedTuple):
    """Shares of N ops, which of them are gates, and the ops whose paths are known.

    Sorted by their least head (or tail), the last of ``known`` has the longest.
    """

    share_ns: Longs  # (N,)
    gate: Ints  # (N,) number of a gate, -1 for other ops
    around: Bits  # (N, K / 64) gates that an op is an ancestor (for tails: a descendant) of
    known: Ints  # (N,)
    least_ns: Longs  # (N,)


def _work(graph: GraphArrays, work_ns: Longs | None) -> _Work:
    """Return the shares with the gates; there are none without shares."""
    count = len(graph)
    gates = min(count, MOST_PAIRS // count)
    if work_ns is None or count > MOST_OPS:
        gates = 0
    edges = np.diff(graph.predecessor_start) + np.diff(graph.successor_start)
    gate = np.full(count, -1, np.int32)
    gate[np.argsort(-edges, kind="stable")[:gates]] = np.arange(gates)
    return _Work(
        share_ns=np.zeros(count, np.int64) if work_ns is None else np.array(work_ns, np.int64),
        gate=gate,
        around=np.zeros((count, (gates + 63) // 64), np.uint64),
        known=np.zeros(count, np.int32),
        least_ns=np.zeros(count, np.int64),
    )


@compiled_borrowing
def _fill_longest(
    topological: Ints,
    predecessor_start: Ints,
    predecessors: Ints,
    edge_bytes: Longs,
    cost_ns: Longs,
    latency_s: Floats,
    bandwidth_bytes_per_s: Floats,
    connected: Bools,
    equal_links: bool,
    moved: Longs,
    work: _Work,
    head: Longs,
    tail: Longs,
) -> None:
    """Fill ``head`` and ``tail`` (N, D), initially 0; ``moved`` (D, D) is scratch space."""
    count, devices = cost_ns.shape
    gates = work.around.shape[1] > 0
    for step in range(2 * count):
        forward = step < count
        v = topological[step] if forward else topological[2 * count - 1 - step]
        if step % count == 0 and gates:
            _find_gates(topological, predecessor_start, predecessors, work, forward)
        if not forward and gates:
            _raise(tail[v], work, v, step - count)
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
            if equal_links:
                moved_ns = transfer_ns(latency_s[0, 1], edge_bytes[e], bandwidth_bytes_per_s[0, 1])
                _extend_over_equal_links(cost_ns, head, tail, u, v, moved_ns, forward)
                continue
            for s in range(devices):
                for d in range(devices):
                    if s == d:
                        moved[s, d] = 0
                    elif connected[s, d]:
                        moved[s, d] = transfer_ns(
                            latency_s[s, d], edge_bytes[e], bandwidth_bytes_per_s[s, d]
                        )
                    else:
                        moved[s, d] = UNREACHABLE_NS
            for here in range(devices):
                least = UNREACHABLE_NS
                for there in range(devices):
                    if forward:
                        time = head[u, there] + cost_ns[u, there] + moved[there, here]
                    else:
                        time = moved[here, there] + cost_ns[v, there] + tail[v, there]
                    least = min(least, time)
                if forward:
                    head[v, here] = max(head[v, here], least)
                else:
                    tail[u, here] = max(tail[u, here], least)
        if forward and gates:
            _raise(head[v], work, v, step)


@compiled_inline
def _extend_over_equal_links(
    cost_ns: Longs, head: Longs, tail: Longs, u: int, v: int, moved_ns: int, forward: bool
) -> None:
    """Extend the paths over an edge whose transfer takes as long between any two devices."""
    devices = cost_ns.shape[1]
    elsewhere = UNREACHABLE_NS
    for there in range(devices):
        path = head[u, there] + cost_ns[u, there] if forward else cost_ns[v, there] + tail[v, there]
        elsewhere = min(elsewhere, path + moved_ns)
    for here in range(devices):
        if forward:
            least = min(elsewhere, head[u, here] + cost_ns[u, here])
            head[v, here] = max(head[v, here], least)
        else:
            least = min(elsewhere, cost_ns[v, here] + tail[v, here])
            tail[u, here] = max(tail[u, here], least)


@compiled_inline
def _find_gates(
    topological: Ints, predecessor_start: Ints, predecessors: Ints, work: _Work, forward: bool
) -> None:
    """Fill ``around``: for heads from the last op to the first, for tails from the first on."""
    count = len(topological)
    work.around[:] = 0
    for step in range(count):
        v = topological[count - 1 - step] if forward else topological[step]
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
            here, there = (u, v) if forward else (v, u)
            for k in range(work.around.shape[1]):
                work.around[here, k] |= work.around[there, k]
            if work.gate[there] >= 0:
                at = work.gate[there]
                work.around[here, at >> 6] |= _ONE << np.uint64(at & 63)


@compiled_inline
def _raise(path_ns: Longs, work: _Work, v: int, known: int) -> None:
    """Raise the path on each device (D,) of v, if a gate; make v one of the ``known`` ops."""
    gate = work.gate[v]
    if gate >= 0:
        least, total = 0, 0
        for k in range(known - 1, -1, -1):
            u = work.known[k]
            if work.around[u, gate >> 6] >> np.uint64(gate & 63) & _ONE:
                total += work.share_ns[u]
                least = max(least, work.least_ns[k] + total)
        for d in range(len(path_ns)):
            path_ns[d] = max(path_ns[d], least)
    shortest = path_ns[0]
    for d in range(1, len(path_ns)):
        shortest = min(shortest, path_ns[d])
    at = known
    while at > 0 and work.least_ns[at - 1] > shortest:
        work.least_ns[at] = work.least_ns[at - 1]
        work.known[at] = work.known[at - 1]
        at -= 1
    work.least_ns[at] = shortest
    work.known[at] = v
