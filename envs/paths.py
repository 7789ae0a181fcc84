"""Longest paths to and from every op on every device, including unavoidable transfers."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing
from envs.nanoseconds import transfer_ns
from envs.problem import Problem

Longs = NDArray[np.int64]
UNREACHABLE_NS: Final = 1 << 60
"""Stands for an impossible time; sums of a few such values stay within 63 bits."""


class Paths(NamedTuple):
    """Lower bounds in ns on the time before (head) and after (tail) each op on each device, (N, D).

    Each edge uses the best device for the op at its other end, independently of other paths, so
    these are lower bounds. Values of ``UNREACHABLE_NS`` or more mean that no placement is allowed.
    """

    head_ns: Longs
    tail_ns: Longs


def paths(problem: Problem) -> Paths:
    """Compute the paths of a problem, in time O(E * D * D)."""
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
        np.zeros((problem.device_count, problem.device_count), np.int64),
        head,
        tail,
    )
    return Paths(head_ns=head, tail_ns=tail)


@compiled_borrowing
def _fill_longest(
    topological: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    edge_bytes: Longs,
    cost_ns: Longs,
    latency_s: NDArray[np.float64],
    bandwidth_bytes_per_s: NDArray[np.float64],
    connected: NDArray[np.bool_],
    moved: Longs,
    head: Longs,
    tail: Longs,
) -> None:
    # Fills ``head`` and ``tail`` (N, D), initially 0; ``moved`` (D, D) is scratch space.
    count, devices = cost_ns.shape
    for step in range(2 * count):
        forward = step < count
        v = topological[step] if forward else topological[2 * count - 1 - step]
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
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
