"""Arrays of a problem for the compiled simulator, and workspaces that fit them."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Longs, Problem, each_in_nanoseconds
from envs.simulator.kernel.arrays import (
    AUTOGRAD,
    CODE_BITS,
    COPY_STATE,
    COUNTS,
    DEVICE_STATE,
    EDGE,
    FORBIDDEN,
    HOST_DEVICE,
    HOST_STATE,
    NO_EVENT,
    OP,
    OP_STATE,
    PAIR,
    QUEUE,
    QUEUE_STATE,
    TRANSFER_STATE,
    WORD_BITS,
    Indices,
    ProblemArrays,
    Table,
    Workspace,
)
from envs.simulator.kernel.issue import forward_op_of, issued_by_autograd
from graphs.graph import PHASES, GraphArrays

EXPRESS_DEVICES: Final = 64
"""Most devices of the express path, where a set of devices is one word."""


def arrays_of(problem: Problem) -> ProblemArrays:
    """Return the arrays of a problem."""
    graph = problem.graph
    edges, devices = graph.edge_count, problem.device_count
    if edges + devices >= 1 << CODE_BITS:
        raise ValueError(
            f"graph {graph.name!r} has {edges} edges, the simulator takes at most "
            f"{(1 << CODE_BITS) - 1 - devices} on {devices} devices; group ops"
        )
    cost_ns, extra_ns, column = _cost_columns(problem)
    none = np.full(devices, -1, np.int32)
    return ProblemArrays(
        cost_ns=cost_ns,
        extra_ns=extra_ns,
        column=column,
        ops=_ops(problem),
        edges=_edges(graph),
        pairs=_pairs(problem),
        queues=_queues(problem),
        memory_bytes=problem.memory_bytes.copy(),
        machine=none if problem.load is None else problem.load.machine.copy(),
        has_load=problem.load is not None,
        hosts=_hosts(problem),
        launch_ns=np.zeros((0, 0), np.int64)
        if problem.hosts is None
        else problem.hosts.op_launch_ns.copy(),
        has_hosts=problem.hosts is not None,
        autograd=_autograd(problem),
        once_per_destination=problem.cluster.once_per_destination,
        express=_may_express(problem),
    )


def workspace_for(problem: Problem) -> Workspace:
    """Return a new workspace that fits a problem; about 90 bytes per op and 76 per edge."""
    n, e = problem.op_count, problem.graph.edge_count
    d, q = problem.device_count, problem.queue_count
    has_ports = bool((problem.second_queue != NO_QUEUE).any())
    words = (n >> WORD_BITS) + 1
    order = np.arange(n, dtype=np.uint32)
    ops = np.zeros(n, OP_STATE)
    ops["rank"] = order
    copies = np.zeros(n + e, COPY_STATE)
    copies["size"][:n] = problem.graph.output_bytes
    return Workspace(
        start_ns=np.zeros(n, np.int64),
        end_ns=np.zeros(n, np.int64),
        cause=np.zeros(n, np.int32),
        ops=ops,
        devices=np.zeros(d, DEVICE_STATE),
        queues=np.zeros(q, QUEUE_STATE),
        transfers=np.zeros(e, TRANSFER_STATE),
        urgency=np.zeros(e),
        copies=copies,
        copy_read=np.zeros(e, np.uint32),
        order=order,
        ranked_priority=np.zeros(n),
        merged=np.zeros(n, np.uint32),
        run_start=np.zeros(n + 1, np.uint32),
        ready=np.zeros((d, words), np.int64),
        ready_words=np.zeros((d, (words >> WORD_BITS) + 1), np.int64),
        touched_devices=np.zeros(d, np.uint32),
        touched_queues=np.zeros(q, np.uint32),
        sent=np.zeros(e, np.uint32),
        unqueued=np.zeros(e, np.uint32),
        waiting=np.full(d * d if has_ports else 0, -1, np.int32),
        waiting_pairs=np.zeros(d * d if has_ports else 0, np.uint32),
        events=np.full(2 << (d + q).bit_length(), NO_EVENT, np.int64),
        unqueued_events=np.zeros(e, np.int64),
        ends=np.full(2 << (d - 1).bit_length(), NO_EVENT, np.int64),
        ready_later=np.full(n + 1, NO_EVENT, np.int64),
        received_bytes=np.zeros(n, np.int64),
        hosts=np.zeros(d, HOST_STATE),
        awaited_ns=np.zeros(e if problem.hosts is not None else 0, np.int64),
        issued=np.full(n, n, np.uint32),
        backward=np.zeros(np.count_nonzero(issued_by_autograd(problem)), np.uint32),
        rests=np.zeros(2, np.int64),
        counts=np.zeros(COUNTS, np.int64),
    )


def _may_express(problem: Problem) -> bool:
    """Return whether the express path is exact where memory suffices; see its module for why."""
    joined = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
    least_bytes = problem.graph.edge_bytes.min(initial=np.iinfo(np.int64).max)
    least_s = problem.latency_s + least_bytes / problem.bandwidth_bytes_per_s
    queue = problem.queue[joined]
    return bool(
        problem.cluster.once_per_destination
        and problem.device_count <= EXPRESS_DEVICES
        and problem.op_count + problem.device_count < 1 << CODE_BITS
        and np.all(problem.cost_ns[problem.allowed] >= 1)
        and np.all(each_in_nanoseconds(least_s[joined]) >= 1)
        and np.all(problem.second_queue[joined] == NO_QUEUE)
        and not problem.queue_by_priority[queue[queue != NO_QUEUE]].any()
    )


def _cost_columns(problem: Problem) -> tuple[Longs, Longs, Indices]:
    """Return the distinct columns of costs and extra costs, (N, K), and that of each device."""
    different: list[tuple[Longs, Longs]] = []
    number: dict[bytes, int] = {}
    no_extra = np.zeros((0, problem.device_count), np.int64)
    extra_ns = no_extra if problem.load is None else problem.load.extra_ns
    column = np.zeros(problem.device_count, np.uint32)
    for d in range(problem.device_count):
        cost = np.where(problem.allowed[:, d], problem.cost_ns[:, d], FORBIDDEN)
        extra = np.ascontiguousarray(extra_ns[:, d])
        key = hashlib.sha256(cost.tobytes() + extra.tobytes()).digest()
        if key not in number:
            number[key] = len(different)
            different.append((cost, extra))
        column[d] = number[key]
    costs, extras = (np.ascontiguousarray(np.column_stack(c)) for c in zip(*different, strict=True))
    return costs, extras, column


def _tails(problem: Problem) -> Longs:
    graph = problem.graph
    cheapest = problem.cheapest_ns().tolist()
    start, successors = graph.successor_start.tolist(), graph.successors.tolist()
    tail = [0] * len(graph)
    for i in reversed(graph.topological.tolist()):
        tail[i] = max(
            (tail[v] + cheapest[v] for v in successors[start[i] : start[i + 1]]), default=0
        )
    return np.array(tail, np.int64)


def _ops(problem: Problem) -> Table:
    graph = problem.graph
    ops = np.zeros(len(graph) + 1, OP)  # one more: where the lists of the last op end
    ops["tail_ns"][:-1] = _tails(problem)
    ops["resident_bytes"][:-1] = graph.resident_bytes
    ops["workspace_bytes"][:-1] = graph.workspace_bytes
    ops["output_bytes"][:-1] = graph.output_bytes
    ops["start_bytes"][:-1] = graph.output_bytes + graph.workspace_bytes + problem.held_bytes
    ops["most_bytes"] = ops["resident_bytes"] + ops["start_bytes"]
    np.add.at(ops["most_bytes"], graph.successors, graph.edge_bytes)
    ops["successor_start"] = graph.successor_start
    ops["predecessor_start"] = graph.predecessor_start
    return ops


def _edges(graph: GraphArrays) -> Table:
    edges = np.zeros(graph.edge_count, EDGE)
    edges["bytes"] = graph.edge_bytes
    edges["source"] = np.repeat(np.arange(len(graph)), np.diff(graph.successor_start))
    edges["target"] = graph.successors
    edges["predecessor_edge"] = graph.predecessor_edge
    edges["predecessor"] = graph.predecessors
    return edges


def _pairs(problem: Problem) -> Table:
    pairs = np.zeros((problem.device_count, problem.device_count), PAIR)
    pairs["source"], pairs["destination"] = np.indices(pairs.shape)
    pairs["latency_s"] = problem.latency_s
    pairs["bandwidth_bytes_per_s"] = problem.bandwidth_bytes_per_s
    pairs["queue"] = problem.queue
    pairs["second_queue"] = problem.second_queue
    of_queue = np.array([*_lines(problem), NO_QUEUE])  # the last entry answers for NO_QUEUE
    pairs["line"] = of_queue[problem.queue]
    pairs["connected"] = problem.connected
    pairs["by_priority"] = np.append(problem.queue_by_priority, False)[problem.queue]
    return pairs.ravel()


def _queues(problem: Problem) -> Table:
    queues = np.zeros(problem.queue_count, QUEUE)
    lines = np.array(_lines(problem), np.int64)
    queues["ports"] = np.bincount(lines, minlength=problem.queue_count)
    queues["by_priority"] = problem.queue_by_priority
    return queues


def _hosts(problem: Problem) -> Table:
    hosts = np.zeros(problem.device_count, HOST_DEVICE)
    if problem.hosts is not None:
        for name in HOST_DEVICE.names or ():
            hosts[name] = getattr(problem.hosts, name)
    return hosts


def _autograd(problem: Problem) -> Table:
    graph, backward = problem.graph, issued_by_autograd(problem)
    if not backward.any():
        return np.zeros(0, AUTOGRAD)
    table = np.zeros(len(graph) + 1, AUTOGRAD)
    table["first"] = table["next"] = -1
    table["is_backward"][:-1] = backward
    of = forward_op_of(graph, backward)
    of[graph.phase == PHASES.index("optimizer")] = len(graph)
    for i in np.flatnonzero(backward)[::-1].tolist():  # lists begin with the lowest index
        table["next"][i], table["first"][of[i]] = table["first"][of[i]], i
    return table


def _lines(problem: Problem) -> list[int]:
    """Return the line of every queue: ports that one transfer needs together share the lowest."""
    line, before = np.arange(problem.queue_count), np.zeros(0, np.int64)
    two = problem.second_queue != NO_QUEUE
    first, second = problem.queue[two], problem.second_queue[two]
    while not np.array_equal(line, before):
        before = line.copy()
        np.minimum.at(line, first, line[second])
        np.minimum.at(line, second, line[first])
    lines: list[int] = line.tolist()
    return lines
