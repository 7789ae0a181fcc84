"""The objective "max-load": the load of the busiest device in a pipeline of micro-batches.

In the steady state of a pipeline (Tarnawski et al., arXiv 2006.16423) every device always works on
some micro-batch, so the largest load determines the throughput and the order of ops does not
matter. The load of a device is the sum of

* the cost of its ops, launch overhead included,
* for each of its ops with consumers on other devices, one transfer: the longest of them,
* for each op elsewhere whose output it reads, one transfer of the largest edge.

Devices of kind "cpu" are not charged for transfers. Memory is the sum over all ops of a device of
what stays there (parameters, with gradients and optimizer state), outputs and workspaces.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline
from envs.problem import (
    HORIZON_NS,
    LARGEST_TOTAL_NS,
    Bools,
    Floats,
    Ints,
    Longs,
    Problem,
    device_row,
    device_rows,
    nanoseconds,
)
from envs.simulator.kernel.arrays import INFEASIBLE_NS
from envs.simulator.reasons import blocked_reason, overfull_reason

HOST_KIND: Final = "cpu"


@by_pointer
class LoadArrays(NamedTuple):
    """Inputs of the load computation; N ops, E edges, D devices."""

    cost_ns: Longs  # (N, D)
    allowed: Bools  # (N, D)
    size_bytes: Longs  # (N,)
    successor_start: Ints  # (N + 1,)
    successors: Ints  # (E,)
    edge_bytes: Longs  # (E,)
    latency_s: Floats  # (D, D)
    bandwidth_bytes_per_s: Floats  # (D, D)
    connected: Bools  # (D, D)
    pays: Bools  # (D,) whether the device is charged for transfers
    memory_bytes: Longs  # (D,)
    longest_ns: int  # of a transfer, so that sums stay within 63 bits


@by_pointer
class Loads(NamedTuple):
    """Loads of one placement and scratch space; integers, so adding and removing ops is exact."""

    load_ns: Longs  # (D,)
    used_bytes: Longs  # (D,)
    cut: Longs  # (1,) transfers between devices without a link
    largest: Longs  # (D,) bytes that the current op sends to each device, -1 for none


def load_arrays(problem: Problem) -> LoadArrays:
    """Return the arrays of a problem as writable, contiguous copies, one type for compiled code."""
    graph = problem.graph
    size = graph.resident_bytes + graph.output_bytes + graph.workspace_bytes
    pays = [device.kind != HOST_KIND for device in problem.cluster.devices]
    return LoadArrays(
        cost_ns=_with_launches(problem),
        allowed=problem.allowed.copy(),
        size_bytes=size,
        successor_start=graph.successor_start.copy(),
        successors=graph.successors.copy(),
        edge_bytes=graph.edge_bytes.copy(),
        latency_s=problem.latency_s.copy(),
        bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s.copy(),
        connected=problem.connected.copy(),
        pays=np.array(pays, np.bool_),
        memory_bytes=problem.memory_bytes.copy(),
        longest_ns=_longest_ns(problem),
    )


def _longest_ns(problem: Problem) -> int:
    return max(LARGEST_TOTAL_NS // max(problem.op_count, 1), HORIZON_NS)


def _with_launches(problem: Problem) -> Longs:
    """Return the costs of all ops with their launches, also those on the thread of a host."""
    if problem.hosts is None:
        return problem.cost_ns.copy()
    return problem.cost_ns + np.where(problem.allowed, problem.hosts.op_launch_ns, 0)


def loads_for(arrays: LoadArrays) -> Loads:
    """Return zero loads, for a placement without ops."""
    count = len(arrays.memory_bytes)
    return Loads(
        load_ns=np.zeros(count, np.int64),
        used_bytes=np.zeros(count, np.int64),
        cut=np.zeros(1, np.int64),
        largest=np.full(count, -1, np.int64),
    )


def least_send_ns(problem: Problem) -> Longs:
    """Return the shortest transfer time of each output (N,): smallest edge over the best link."""
    graph = problem.graph
    linked = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
    least = np.zeros(problem.op_count, np.int64)
    read = np.flatnonzero(np.diff(graph.successor_start))
    if not len(read) or not linked.any():
        return least
    size_bytes = np.minimum.reduceat(graph.edge_bytes, graph.successor_start[read])
    seconds = np.full(len(read), np.inf)
    links = np.stack([problem.latency_s[linked], problem.bandwidth_bytes_per_s[linked]])
    for latency_s, bandwidth in np.unique(links, axis=1).T:
        np.minimum(seconds, latency_s + size_bytes / bandwidth, out=seconds)
    longest_ns = _longest_ns(problem)
    least[read] = [nanoseconds(each, longest_ns) for each in seconds.tolist()]
    return least


def max_load_ns(problem: Problem, devices: Ints) -> Longs:
    """Return the largest loads (B,) of placements (B, N), or (1,) for one placement (N,).

    ``INFEASIBLE_NS`` if an op is on a forbidden device, an edge has no link, or memory is exceeded.
    """
    rows = device_rows(problem, devices)
    answer = np.empty(len(rows), np.int64)
    arrays = load_arrays(problem)
    _largest_loads(arrays, loads_for(arrays), rows, answer)
    return answer


def loads_of(problem: Problem, devices: Ints) -> Loads:
    """Return loads and memory of one placement (N,); edges without a link count as 0."""
    arrays = load_arrays(problem)
    loads = loads_for(arrays)
    _largest_loads(arrays, loads, device_row(problem, devices)[None], np.empty(1, np.int64))
    return loads


def overload_reason(problem: Problem, devices: Ints) -> str:
    """Return why a placement (N,) is infeasible, or "" if it is feasible."""
    row = device_row(problem, devices)
    used_bytes = loads_of(problem, row).used_bytes
    return blocked_reason(problem, row) or overfull_reason(problem, row, used_bytes)


@compiled_borrowing
def _largest_loads(arrays: LoadArrays, loads: Loads, devices: Ints, answer: Longs) -> None:
    for b in range(len(devices)):
        fits = count_all(arrays, loads, devices[b])
        answer[b] = largest_load(loads) if fits else INFEASIBLE_NS


@compiled_inline
def count_all(arrays: LoadArrays, loads: Loads, devices: Ints) -> bool:
    """Compute the loads of a whole placement (N,) and return whether it is feasible."""
    loads.cut[0] = 0
    for d in range(len(loads.load_ns)):
        loads.load_ns[d] = 0
        loads.used_bytes[d] = 0
    fits = True
    for i in range(len(devices)):
        fits &= arrays.allowed[i, devices[i]]
        count_op(arrays, loads, devices, i, 1)
    for d in range(len(loads.load_ns)):
        fits &= loads.used_bytes[d] <= arrays.memory_bytes[d]
    return fits and loads.cut[0] == 0


@compiled_inline
def largest_load(loads: Loads) -> int:
    """Return the load of the busiest device."""
    most = 0
    for d in range(len(loads.load_ns)):
        most = max(most, loads.load_ns[d])
    return int(most)


@compiled_inline
def count_op(arrays: LoadArrays, loads: Loads, devices: Ints, i: int, sign: int) -> None:
    """Add the cost of op i and of the transfers of its output; remove them if sign is -1."""
    home = devices[i]
    loads.load_ns[home] += sign * arrays.cost_ns[i, home]
    loads.used_bytes[home] += sign * arrays.size_bytes[i]
    first, end = arrays.successor_start[i], arrays.successor_start[i + 1]
    for k in range(first, end):
        d = devices[arrays.successors[k]]
        if d != home:
            loads.largest[d] = max(loads.largest[d], arrays.edge_bytes[k])
    longest = 0
    for k in range(first, end):
        d = devices[arrays.successors[k]]
        if d == home or loads.largest[d] < 0:
            continue
        if arrays.connected[home, d]:
            size = loads.largest[d]
            sent_s = arrays.latency_s[home, d] + size / arrays.bandwidth_bytes_per_s[home, d]
            sent_ns = int(np.rint(min(sent_s * 1e9, float(arrays.longest_ns))))
            longest = max(longest, sent_ns)
            if arrays.pays[d]:
                loads.load_ns[d] += sign * sent_ns
        else:
            loads.cut[0] += sign
        loads.largest[d] = -1
    if arrays.pays[home]:
        loads.load_ns[home] += sign * longest
