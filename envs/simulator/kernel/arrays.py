"""Inputs and workspace of the compiled simulator: named tuples of flat arrays.

N ops, E edges, D devices, Q queues. Make both once per problem, see
``envs.simulator.kernel.tables``: compiled code is specialized on their exact types.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer
from envs.problem import HORIZON_BITS, HORIZON_NS, Floats, Ints, Longs

Indices = NDArray[np.uint32]
Table = NDArray[np.void]

CODE_BITS: Final = 63 - HORIZON_BITS
"""An event is one integer, ``time << CODE_BITS | code``."""
NO_EVENT: Final = (1 << 63) - 1
"""Later than every event; no event has its code."""
INFEASIBLE_NS: Final = (1 << 63) - 1
"""Step time of a placement that cannot run."""
NO_LIMIT_NS: Final = INFEASIBLE_NS
OVERFULL_NS: Final = HORIZON_NS
"""Least step time of placements that exceed memory with ``RANK_EXCESS``; it grows with the
excess."""

IGNORE_MEMORY: Final = 0
STOP_WHEN_FULL: Final = 1
RECORD_MEMORY: Final = 2
RANK_EXCESS: Final = 3

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
READY_LATER: Final = 7
EXPRESS: Final = 8
WAITING_PAIRS: Final = 9
COUNTS: Final = 10


def _table(**columns: str) -> np.dtype[np.void]:
    """Return a record dtype; the columns of a row are adjacent in memory."""
    return np.dtype(list(columns.items()), align=True)


OP: Final = _table(
    tail_ns="i8",  # least time from the op's end to the end of the step
    resident_bytes="i8",  # parameters, gradients and optimizer state
    workspace_bytes="i8",
    output_bytes="i8",
    start_bytes="i8",  # output, workspace and held bytes
    most_bytes="i8",  # most that the op can need on its device, with copies of all inputs
    successor_start="u4",
    predecessor_start="u4",
)
EDGE: Final = _table(
    bytes="i8",
    source="u4",
    target="u4",
    predecessor_edge="u4",  # by position in the list of predecessors, unlike the others
    predecessor="u4",  # by position in the list of predecessors, too
)
PAIR: Final = _table(
    latency_s="f8",
    bandwidth_bytes_per_s="f8",
    source="u4",
    destination="u4",
    queue="i4",  # that a transfer occupies, -1 for none
    second_queue="i4",  # that it occupies, too, -1 for none
    line="i4",  # where it waits: its queue, or the first of the link's ports
    connected="?",
    by_priority="?",
)
QUEUE: Final = _table(
    ports="i4",  # number of queues that take their transfers from this line
    by_priority="?",
)
OP_STATE: Final = _table(
    remaining="i4",  # inputs not yet there; express: inputs of unknown arrival
    rank="u4",  # by priority
    latest="i8",  # express: latest known arrival; hosts: rank among the backward ops
)
DEVICE_STATE: Final = _table(
    work_left_ns="i8",  # cost of the ops that have not started
    used_bytes="i8",
    peak_bytes="i8",
    most_bytes="i8",  # sum of most_bytes of its ops
    running="i4",  # op, or -1
    previous="i4",  # last op that ended, or -1; express: last that started
    opened="i4",  # last transfer that was opened to this device, or -1
    ready="i4",  # number of ready ops
    lone="i4",  # the only ready op, which is in no bitmap, or -1
    ready_first="i4",  # words of ready_words before this one are 0
    touched="?",
    busy_until_ns="i8",  # express: end of the last op that started
    sent_bytes="i8",  # express: bytes of the current output that are read here
    arrival="i8",  # express: arrival of the current output here
)
QUEUE_STATE: Final = _table(
    idle_ports="i4",
    waiting="i4",  # first transfer that waits, root of a skew heap, or -1; with ports see Workspace
    busy="?",
    touched="?",
    free_ns="i8",  # express: end of its last transfer
)
COPY_STATE: Final = _table(
    size="i8",
    users="i4",  # consumers on the device, and transfers from it, that need this copy
)
TRANSFER_STATE: Final = _table(  # by edge; a transfer has the number of one of its edges
    start_ns="i8",  # while it waits: when it was requested
    duration_ns="i8",
    next_edge="i4",  # next edge of the same transfer, or -1
    left="i4",  # skew heap
    right="i4",
    pair="u4",  # its two devices
)
HOST_DEVICE: Final = _table(
    launch_ns="i8",  # that a copy which goes on without it occupies its thread
    staging_bytes_per_s="f8",  # at which its thread writes what is sent beside the ops
    thread="u4",  # that issues the ops of this device
    synchronous="?",  # an op occupies its thread until it ends
    overlap="?",  # copies from here run beside the ops
)
AUTOGRAD: Final = _table(
    first="i4",  # of a forward op: the first of its backward ops, or -1
    next="i4",  # of a backward op: the next one of the same forward op, or -1
    is_backward="?",
)
HOST_STATE: Final = _table(  # by thread
    clock_ns="i8",  # until then it is occupied
    written_ns="i8",  # until then its second thread is, which writes what is sent from the CPU
    left_ns="i8",  # that ops still to be issued will occupy it
    blocked_by="i4",  # op that it waited for last, or -1
)


@by_pointer
class ProblemArrays(NamedTuple):
    """Inputs of a simulation, which does not change them."""

    cost_ns: Longs  # (N, K) one column for all devices with the same costs, -1: not allowed
    extra_ns: Longs  # (N, K) with load: that ops cost more while all others of the machine compute
    column: Indices  # (D,) of cost_ns and extra_ns
    ops: Table  # (N + 1,) of OP
    edges: Table  # (E,) of EDGE
    pairs: Table  # (D * D,) of PAIR, by source, then destination
    queues: Table  # (Q,) of QUEUE
    memory_bytes: Longs  # (D,)
    machine: Ints  # (D,) the same number where devices slow each other down, -1 for none
    has_load: bool  # see envs.simulator.kernel.load
    hosts: Table  # (D,) of HOST_DEVICE
    launch_ns: (
        Longs  # (N, D) with hosts: that an op occupies its thread, if it does not until its end
    )
    has_hosts: bool  # see envs.simulator.kernel.host
    autograd: Table  # (N + 1,) of AUTOGRAD, the last row has the optimizer ops; (0,) without it
    once_per_destination: bool
    express: bool  # see envs.simulator.kernel.express, which keeps its own fields in a workspace


@by_pointer
class Workspace(NamedTuple):
    """Output and scratch arrays of a simulation; one at a time may use them, any number of times.

    After a simulation that reached its end, ``start_ns`` (N) holds the start of every op, and
    ``cause`` (N) the op that determined this start (the previous one on its device, or the producer
    of its last input; -1 for a start at 0). With ``RECORD_MEMORY``, ``devices["peak_bytes"]`` (D)
    is then the peak memory of every device, and the first ``counts[SENT]`` entries of ``sent`` are
    the transfers, each named by one of its edges, with ``start_ns`` and ``duration_ns`` in
    ``transfers``. ``counts[EXPRESS]`` is 1 for a step that took the express path.

    A copy is what consumers on one device read: copy i is the output of op i where it was made,
    copy N + e what transfer e brings.
    """

    start_ns: Longs  # (N,) until an op starts: when it became ready
    end_ns: Longs  # (N,) with load only, see envs.simulator.kernel.load
    cause: Ints  # (N,)
    ops: Table  # (N,) of OP_STATE
    devices: Table  # (D,) of DEVICE_STATE
    queues: Table  # (Q,) of QUEUE_STATE
    transfers: Table  # (E,) of TRANSFER_STATE
    urgency: Floats  # (E,) highest priority of a transfer's consumers, if its line goes by that
    copies: Table  # (N + E,) of COPY_STATE
    copy_read: Indices  # (E,) the copy that the target of an edge reads
    order: Indices  # (N,) ops by rank
    ranked_priority: Floats  # (N,) priorities for which ranks and order are valid
    merged: Indices  # (N,)
    run_start: Indices  # (N + 1,)
    ready: Longs  # (D, words) bit r of a row: the op of rank r is ready, and not the only one
    ready_words: Longs  # (D, words of words) which words of ready are not 0
    touched_devices: Indices  # (D,)
    touched_queues: Indices  # (Q,)
    sent: Indices  # (E,)
    unqueued: Indices  # (E,) transfers that start without waiting
    waiting: Ints  # with ports: (D * D,) first transfer of a pair that waits, root of a heap, or -1
    waiting_pairs: Indices  # with ports: (D * D,) the pairs with waiting transfers, in any order
    events: Longs  # (2 P,) the next event of every slot, see envs.simulator.kernel.queues
    unqueued_events: Longs  # (E,) binary heap
    ends: Longs  # express: (2 P,) the next end of every device, a tree like events
    ready_later: Longs  # express: (N + 1,) heap of when ops become ready
    received_bytes: Longs  # express: (N,) received for every op until it ends
    hosts: Table  # (D,) of HOST_STATE
    awaited_ns: Longs  # (E,) with hosts: until then the thread of its reader waits; -1: for nothing
    issued: Indices  # (N,) with hosts: ops in the order of issue; N first if not known
    backward: Indices  # with autograd: backward ops by rank
    rests: Longs  # (2,) see envs.simulator.kernel.step
    counts: Longs  # (COUNTS,)
