"""The objective "max-load": the load of the busiest device when micro-batches follow each other.

In the steady state of a pipeline (Tarnawski et al., arXiv 2006.16423) every device works on some
micro-batch all the time, so the one with the largest load sets the pace and order does not matter.
The load of a device is

* the cost, with launch, of its ops,
* for each of its ops that other devices need, one transfer, however many need it: the longest,
* for each op elsewhere that it needs, one transfer, of the largest of the edges.

A device of kind "cpu" pays for no transfer. Memory is the sum of parameters, outputs and workspaces
of all ops of a device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing, compiled_inline
from envs.compiled_tables import by_pointer
from envs.nanoseconds import nanoseconds, transfer_ns
from envs.problem import Problem
from envs.rows import device_row, device_rows
from envs.simulator.arrays import INFEASIBLE_NS
from envs.simulator.reasons import why_blocked, why_full

HOST_KIND: Final = "cpu"

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@by_pointer
class LoadArrays(NamedTuple):
    """What counting loads reads; N ops, E edges, D devices."""

    cost_ns: Longs  # (N, D)
    allowed: Bools  # (N, D)
    size_bytes: Longs  # (N,)
    successor_start: Ints  # (N + 1,)
    successors: Ints  # (E,)
    edge_bytes: Longs  # (E,)
    latency_s: Floats  # (D, D)
    bandwidth_bytes_per_s: Floats  # (D, D)
    connected: Bools  # (D, D)
    pays: Bools  # (D,) for transfers
    memory_bytes: Longs  # (D,)


@by_pointer
class Loads(NamedTuple):
    """Loads of one placement, and scratch space; exact under adding and removing ops."""

    load_ns: Longs  # (D,)
    used_bytes: Longs  # (D,)
    cut: Longs  # (1,) transfers between devices without a link
    largest: Longs  # (D,) of the current op: bytes to each device, -1 for nothing


def load_arrays(problem: Problem) -> LoadArrays:
    """The arrays of a problem, writable and contiguous: one type for compiled code."""
    graph = problem.graph
    size = graph.resident_bytes + graph.output_bytes + graph.workspace_bytes
    pays = [device.kind != HOST_KIND for device in problem.cluster.devices]
    return LoadArrays(
        cost_ns=problem.cost_ns.copy(),
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
    )


def loads_for(arrays: LoadArrays) -> Loads:
    """Loads of no op at all."""
    count = len(arrays.memory_bytes)
    return Loads(
        load_ns=np.zeros(count, np.int64),
        used_bytes=np.zeros(count, np.int64),
        cut=np.zeros(1, np.int64),
        largest=np.full(count, -1, np.int64),
    )


def least_send_ns(problem: Problem) -> Longs:
    """What one transfer of each output (N,) takes at least: its smallest edge on the best link."""
    graph = problem.graph
    linked = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
    least = np.zeros(problem.op_count, np.int64)
    latency_s, bandwidth = problem.latency_s[linked], problem.bandwidth_bytes_per_s[linked]
    for i, (first, end) in enumerate(pairwise(graph.successor_start.tolist())):
        if first < end and len(latency_s):
            seconds = latency_s + graph.edge_bytes[first:end].min() / bandwidth
            least[i] = nanoseconds(float(seconds.min()))
    return least


def max_load_ns(problem: Problem, devices: NDArray[np.int32]) -> Longs:
    """Largest loads (B,) of placements (B, N), or (1,) of one (N,).

    ``INFEASIBLE_NS`` where an op may not run, an edge has no link, or memory does not suffice.

    Raises:
        ValueError: a wrong shape, what is no whole number, or a device that does not exist.
    """
    rows = device_rows(problem, devices)
    answer = np.empty(len(rows), np.int64)
    arrays = load_arrays(problem)
    _largest_loads(arrays, loads_for(arrays), rows, answer)
    return answer


def loads_ns(problem: Problem, devices: NDArray[np.int32]) -> Longs:
    """Loads (D,) of one placement (N,); edges without a link count as nothing.

    Raises:
        ValueError: as for :func:`max_load_ns`.
    """
    return _counted(problem, device_row(problem, devices)).load_ns


def why_overloaded(problem: Problem, devices: NDArray[np.int32]) -> str:
    """Why a placement (N,) is infeasible, for people; "" where it is not.

    Raises:
        ValueError: as for :func:`max_load_ns`.
    """
    row = device_row(problem, devices)
    return why_blocked(problem, row) or why_full(problem, row, used_bytes(problem, row))


def used_bytes(problem: Problem, devices: NDArray[np.int32]) -> Longs:
    """Memory (D,) that counts against that of each device under this objective, for (N,).

    Raises:
        ValueError: as for :func:`max_load_ns`.
    """
    return _counted(problem, device_row(problem, devices)).used_bytes


def _counted(problem: Problem, devices: Ints) -> Loads:
    arrays = load_arrays(problem)
    loads = loads_for(arrays)
    _largest_loads(arrays, loads, devices[None], np.empty(1, np.int64))
    return loads


@compiled_borrowing
def _largest_loads(arrays: LoadArrays, loads: Loads, devices: Ints, answer: Longs) -> None:
    for b in range(len(devices)):
        fits = count_all(arrays, loads, devices[b])
        answer[b] = largest_load(loads) if fits else INFEASIBLE_NS


@compiled_inline
def count_all(arrays: LoadArrays, loads: Loads, devices: Ints) -> bool:
    """Loads of a whole placement (N,); False where it is not feasible."""
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
    """The load of the busiest device."""
    most = 0
    for d in range(len(loads.load_ns)):
        most = max(most, loads.load_ns[d])
    return int(most)


@compiled_inline
def count_op(arrays: LoadArrays, loads: Loads, devices: Ints, i: int, sign: int) -> None:
    """Add (or, with sign -1, take away) what op i and the transfers of its output cost."""
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
            sent_ns = transfer_ns(
                arrays.latency_s[home, d], loads.largest[d], arrays.bandwidth_bytes_per_s[home, d]
            )
            longest = max(longest, sent_ns)
            if arrays.pays[d]:
                loads.load_ns[d] += sign * sent_ns
        else:
            loads.cut[0] += sign
        loads.largest[d] = -1
    if arrays.pays[home]:
        loads.load_ns[home] += sign * longest
