"""What the compiled simulator reads and writes: named tuples of flat arrays.

N ops, E edges, D devices, Q queues. Make both once per problem, with :func:`arrays_of` and
:func:`workspace_for`: compiled code is specialised on their exact types.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.problem import NO_QUEUE, Problem
from graphs.graph import GraphArrays

Floats = NDArray[np.float64]
Indices = NDArray[np.uint32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Table = NDArray[np.void]

CODE_BITS: Final = 24
"""An event is one integer, ``time << CODE_BITS | code``."""
NO_EVENT: Final = (1 << 63) - 1
"""Later than every event; none has its code."""
HORIZON_NS: Final = 1 << (63 - CODE_BITS)
"""Times stay below this, 550 s."""
INFEASIBLE_NS: Final = (1 << 63) - 1
"""Step of a placement that cannot run."""
NO_LIMIT_NS: Final = INFEASIBLE_NS

IGNORE_MEMORY: Final = 0
STOP_WHEN_FULL: Final = 1
RECORD_MEMORY: Final = 2
RECORD_EXCESS: Final = 3

FORBIDDEN: Final = -1
"""Cost of an op on a device where it may not run."""

WORD_BITS: Final = 6
"""Bitmaps have words of 64 bits."""

# Entries of Workspace.counts
UNQUEUED_EVENTS: Final = 0
TOUCHED_DEVICES: Final = 1
TOUCHED_QUEUES: Final = 2
UNQUEUED: Final = 3
SENT: Final = 4
FULL: Final = 5
BEYOND_HORIZON: Final = 6
COUNTS: Final = 7


def _table(**columns: str) -> np.dtype[np.void]:
    """A record of these columns; what one row holds lies side by side in memory."""
    return np.dtype(list(columns.items()), align=True)


_OP: Final = _table(
    tail_ns="i8",  # least time from the op's end to the end of the step
    resident_bytes="i8",  # parameters, gradients and optimizer state
    workspace_bytes="i8",
    start_bytes="i8",  # output, workspace and held bytes
    most_bytes="i8",  # all that the op can need on its device: with copies of all its inputs
    successor_start="u4",
    predecessor_start="u4",
)
_EDGE: Final = _table(
    bytes="i8",
    source="u4",
    target="u4",
    predecessor_edge="u4",  # by position in the list of predecessors, unlike the others
)
_PAIR: Final = _table(
    latency_s="f8",
    bandwidth_bytes_per_s="f8",
    source="u4",
    destination="u4",
    queue="i4",  # what a transfer occupies, -1 for nothing
    second_queue="i4",  # what it occupies besides, -1 for nothing
    line="i4",  # where it waits: its queue, or the first of the ports that are one link's
    connected="?",
    by_priority="?",
)
_QUEUE: Final = _table(
    ports="i4",  # how many queues take their transfers from this line
    by_priority="?",
)
_OP_STATE: Final = _table(
    remaining="i4",  # inputs not yet there
    rank="u4",  # by priority
)
_DEVICE_STATE: Final = _table(
    work_left_ns="i8",  # cost of the ops that have not started
    used_bytes="i8",
    peak_bytes="i8",
    most_bytes="i8",  # all that its ops can need, if they need it at once
    running="i4",  # op, or -1
    previous="i4",  # last op that ended, or -1
    opened="i4",  # last transfer that was opened to this device, or -1
    ready_first="i4",  # no word of ready_words before this one is set
    touched="?",
)
_QUEUE_STATE: Final = _table(
    idle_ports="i4",
    waiting="i4",  # first transfer that waits, root of a skew heap, or -1
    busy="?",
    touched="?",
)
_COPY_STATE: Final = _table(
    size="i8",
    users="i4",  # consumers on the device, and transfers from it, that still need this copy
)
_TRANSFER_STATE: Final = _table(  # by edge; a transfer has the number of one of its edges
    start_ns="i8",  # while it waits: when it was requested
    duration_ns="i8",
    next_edge="i4",  # next edge of the same transfer, or -1
    left="i4",  # skew heap
    right="i4",
    pair="u4",  # its two devices
)


class ProblemArrays(NamedTuple):
    """What a simulation only reads."""

    cost_ns: Longs  # (N, K) one column for all devices with the same costs, -1: not allowed
    column: Indices  # (D,) of cost_ns
    ops: Table  # (N + 1,) of _OP
    edges: Table  # (E,) of _EDGE
    pairs: Table  # (D * D,) of _PAIR, by source, then destination
    queues: Table  # (Q,) of _QUEUE
    memory_bytes: Longs  # (D,)
    once_per_destination: bool


class Workspace(NamedTuple):
    """What a simulation writes; use it for one simulation at a time, as often as you like.

    After a simulation that reached its end, ``start_ns`` (N) holds when every op started,
    ``cause`` (N) the op that made it start then (the one before it on its device, or the producer
    of its last input; -1 for a start at 0), and the first ``counts[SENT]`` entries of ``sent`` the
    transfers, each named by one of its edges, with ``start_ns`` and ``duration_ns`` in
    ``transfers``. ``devices["peak_bytes"]`` (D) is the peak memory of every device where memory
    was recorded.

    A copy is what consumers on one device read: copy i is the output of op i where it was made,
    copy N + e what transfer e brings.
    """

    start_ns: Longs  # (N,) until an op starts: when it became ready
    cause: Ints  # (N,)
    ops: Table  # (N,) of _OP_STATE
    devices: Table  # (D,) of _DEVICE_STATE
    queues: Table  # (Q,) of _QUEUE_STATE
    transfers: Table  # (E,) of _TRANSFER_STATE
    urgency: Floats  # (E,) highest priority of a transfer's consumers, if its line goes by that
    copies: Table  # (N + E,) of _COPY_STATE
    copy_read: Indices  # (E,) the copy that the target of an edge reads
    order: Indices  # (N,) ops by rank
    ranked_priority: Floats  # (N,) the priorities for which ranks and order hold
    merged: Indices  # (N,)
    run_start: Indices  # (N + 1,)
    ready: Longs  # (D, words) bit r of a row: the op of rank r is ready
    ready_words: Longs  # (D, words of words) which words of ready are not 0
    touched_devices: Indices  # (D,)
    touched_queues: Indices  # (Q,)
    sent: Indices  # (E,)
    unqueued: Indices  # (E,) transfers that start without waiting; also those put back into a line
    events: Longs  # (2 P,) the next event of every slot, see envs.simulator.events
    unqueued_events: Longs  # (E,) binary heap
    counts: Longs  # (COUNTS,)


def arrays_of(problem: Problem) -> ProblemArrays:
    """The arrays of a problem.

    Raises:
        ValueError: there are too many edges to number their events.
    """
    graph = problem.graph
    edges, devices = graph.edge_count, problem.device_count
    if edges + devices >= 1 << CODE_BITS:
        raise ValueError(
            f"graph {graph.name!r} has {edges} edges, the simulator takes at most "
            f"{(1 << CODE_BITS) - 1 - devices} on {devices} devices; group ops"
        )
    cost_ns, column = _cost_columns(problem)
    return ProblemArrays(
        cost_ns=cost_ns,
        column=column,
        ops=_ops(problem),
        edges=_edges(graph),
        pairs=_pairs(problem),
        queues=_queues(problem),
        memory_bytes=_plain(problem.memory_bytes),
        once_per_destination=problem.cluster.once_per_destination,
    )


def workspace_for(problem: Problem) -> Workspace:
    """A fresh workspace that fits a problem; about 60 bytes per op and 76 per edge."""
    n, e = problem.op_count, problem.graph.edge_count
    d, q = problem.device_count, problem.queue_count
    words = (n >> WORD_BITS) + 1
    order = np.arange(n, dtype=np.uint32)
    ops = np.zeros(n, _OP_STATE)
    ops["rank"] = order
    copies = np.zeros(n + e, _COPY_STATE)
    copies["size"][:n] = problem.graph.output_bytes
    return Workspace(
        start_ns=np.zeros(n, np.int64),
        cause=np.zeros(n, np.int32),
        ops=ops,
        devices=np.zeros(d, _DEVICE_STATE),
        queues=np.zeros(q, _QUEUE_STATE),
        transfers=np.zeros(e, _TRANSFER_STATE),
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
        events=np.full(2 << (d + q).bit_length(), NO_EVENT, np.int64),
        unqueued_events=np.zeros(e, np.int64),
        counts=np.zeros(COUNTS, np.int64),
    )


def _cost_columns(problem: Problem) -> tuple[Longs, Indices]:
    """The different columns of costs, (N, K), and which of them each device has, (D,)."""
    different: list[Longs] = []
    number: dict[bytes, int] = {}
    column = np.zeros(problem.device_count, np.uint32)
    for d in range(problem.device_count):
        cost = np.where(problem.allowed[:, d], problem.cost_ns[:, d], FORBIDDEN)
        key = hashlib.sha256(cost.data).digest()
        if key not in number:
            number[key] = len(different)
            different.append(cost)
        column[d] = number[key]
    return np.ascontiguousarray(np.column_stack(different)), column


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
    ops = np.zeros(len(graph) + 1, _OP)  # one more: where the lists of the last op end
    ops["tail_ns"][:-1] = _tails(problem)
    ops["resident_bytes"][:-1] = graph.resident_bytes
    ops["workspace_bytes"][:-1] = graph.workspace_bytes
    ops["start_bytes"][:-1] = graph.output_bytes + graph.workspace_bytes + problem.held_bytes
    ops["most_bytes"] = ops["resident_bytes"] + ops["start_bytes"]
    np.add.at(ops["most_bytes"], graph.successors, graph.edge_bytes)
    ops["successor_start"] = graph.successor_start
    ops["predecessor_start"] = graph.predecessor_start
    return ops


def _edges(graph: GraphArrays) -> Table:
    edges = np.zeros(graph.edge_count, _EDGE)
    edges["bytes"] = graph.edge_bytes
    edges["source"] = np.repeat(np.arange(len(graph)), np.diff(graph.successor_start))
    edges["target"] = graph.successors
    edges["predecessor_edge"] = graph.predecessor_edge
    return edges


def _pairs(problem: Problem) -> Table:
    pairs = np.zeros((problem.device_count, problem.device_count), _PAIR)
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
    queues = np.zeros(problem.queue_count, _QUEUE)
    lines = np.array(_lines(problem), np.int64)
    queues["ports"] = np.bincount(lines, minlength=problem.queue_count)
    queues["by_priority"] = problem.queue_by_priority
    return queues


def _lines(problem: Problem) -> list[int]:
    """The line of every queue: ports that some transfer needs together share the lowest's."""
    line = list(range(problem.queue_count))
    for s, d in np.argwhere(problem.second_queue != NO_QUEUE).tolist():
        a, b = line[problem.queue[s, d]], line[problem.second_queue[s, d]]
        line = [min(a, b) if other in (a, b) else other for other in line]
    return line


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """A writable, contiguous copy: one array type for compiled code, whoever made the array."""
    return np.array(array, order="C", copy=True)
