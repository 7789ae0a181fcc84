"""The compiled core: one step of a placed graph, event by event, in integer nanoseconds.

Time advances from instant to instant. An instant is a number of rounds (more than one only where
something takes no time): first everything that ends is handled, then every idle device picks its
ready op of highest priority, and every idle queue its first waiting transfer. A queue serves in
order of request (instants first, then producer, destination and edge), or, by priority, the
transfer whose highest-priority consumer on the destination is highest, ties in order of request.
On a half-duplex "egress" link, or one with ``ingress``, a transfer needs the ports of both its
ends; waiting transfers of the link are looked at in queue order, and each whose two ports are idle
starts.

Memory of a device, frees before allocations in a round: parameters, gradients and optimizer state
of its ops throughout; held bytes of an op from its start on; its output from its start until the
last consumer there and the last transfer of it have ended (to the end of the step without
consumers); its workspace while it runs; a received copy from the start of its transfer until its
last consumer there has ended.

All functions can be called from compiled code.
"""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_borrowing, compiled_inline, index
from envs.simulator.arrays import (
    BEYOND_HORIZON,
    CODE_BITS,
    COUNTS,
    FORBIDDEN,
    FULL,
    HORIZON_NS,
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_EVENT,
    NO_LIMIT_NS,
    RECORD_MEMORY,
    SENT,
    STOP_WHEN_FULL,
    TOUCHED_DEVICES,
    Floats,
    Ints,
    Longs,
    ProblemArrays,
    Workspace,
)
from envs.simulator.events import add_event, set_event
from envs.simulator.ranks import rank_ops
from envs.simulator.ready import arrive, clear_ready, make_ready, pop_ready, touch_device
from envs.simulator.sending import allocate, end_transfer, request, start_transfers

_CODE_MASK: Final = (1 << CODE_BITS) - 1


@compiled_borrowing
def simulate_core(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    priority: Floats,
    limit_ns: int,
    memory: int,
) -> int:
    """Nanoseconds of one step.

    Args:
        arrays: of the problem, see ``arrays_of``.
        work: a workspace for it, see ``workspace_for``; holds the schedule afterwards, unless the
            step was aborted.
        devices: (N,) int32, each in 0 .. D-1 (not checked).
        priority: (N,) float64 without nan (not checked).
        limit_ns: abort as soon as the step provably takes longer; ``NO_LIMIT_NS`` for never.
        memory: ``IGNORE_MEMORY``, ``STOP_WHEN_FULL`` (a placement that does not fit is
            infeasible), ``RECORD_MEMORY`` (peaks are recorded and never stop anything) or
            ``RECORD_EXCESS`` (the same, but only those above a device's memory are sure to be).

    Returns:
        The step if it is at most ``limit_ns``, else some number above ``limit_ns`` (the largest of
        all cannot be exceeded). ``INFEASIBLE_NS``: an op is where it may not run, an edge joins
        devices without a link, or memory does not suffice. The same with
        ``work.counts[BEYOND_HORIZON]`` set: the step reaches ``HORIZON_NS``.
    """
    rank_ops(work, priority)
    if not _reset(arrays, work, devices, memory):
        clear_ready(work)
        return INFEASIBLE_NS
    if memory != RECORD_MEMORY and _fits_anyway(arrays, work):
        memory = IGNORE_MEMORY
    device_count = len(arrays.memory_bytes)
    now = 0
    while True:
        # As long as the limit holds, start what can start.
        beyond = _start_ops(arrays, work, devices, now, limit_ns, memory)
        if beyond >= 0:
            clear_ready(work)
            return beyond
        start_transfers(arrays, work, now, memory)
        if work.counts[FULL] + work.counts[BEYOND_HORIZON] > 0:
            clear_ready(work)
            return INFEASIBLE_NS
        event = work.events[1]
        if event == NO_EVENT:
            return now
        # Handle everything that ends next.
        now = event >> CODE_BITS
        while event >> CODE_BITS == now and event != NO_EVENT:
            code = index(event & _CODE_MASK)
            if code >= device_count:
                number = index(code - device_count)
                end_transfer(arrays, work, number, now, memory)
            elif not _end_op(arrays, work, devices, priority, code, now, memory):
                clear_ready(work)
                return INFEASIBLE_NS
            event = work.events[1]


@compiled_borrowing
def simulate_batch(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    priority: Floats,
    memory: int,
    step_ns: Longs,
) -> int:
    """Steps of B placements (B, N) into ``step_ns`` (B,).

    Returns:
        -1, or the first placement whose step reaches ``HORIZON_NS``; those after it are not timed.
    """
    for b in range(len(devices)):
        step_ns[b] = simulate_core(arrays, work, devices[b], priority[b], NO_LIMIT_NS, memory)
        if work.counts[BEYOND_HORIZON] > 0:
            return b
    return -1


@compiled_inline
def _reset(arrays: ProblemArrays, work: Workspace, devices: Ints, memory: int) -> bool:
    """Time 0, nothing started; False where an op may not run on its device or does not fit."""
    for k in range(COUNTS):
        work.counts[k] = 0
    for k in range(len(work.events)):
        work.events[k] = NO_EVENT
    for d in range(len(work.devices)):
        device = work.devices[d]
        device.running = -1
        device.previous = -1
        device.opened = -1
        device.work_left_ns = 0
        device.used_bytes = 0
        device.most_bytes = 0
        device.touched = False
    for q in range(len(work.queues)):
        queue = work.queues[q]
        queue.idle_ports = arrays.queues[q].ports
        queue.waiting = -1
        queue.busy = False
        queue.touched = False
    for number in range(len(devices)):
        i = index(number)
        d = index(devices[i])
        cost = arrays.cost_ns[i, arrays.column[d]]
        if cost == FORBIDDEN:
            return False
        op = arrays.ops[i]
        device = work.devices[d]
        device.work_left_ns += cost
        device.used_bytes += op.resident_bytes
        device.most_bytes += op.most_bytes
        inputs = arrays.ops[index(i + 1)].predecessor_start - op.predecessor_start
        work.ops[i].remaining = inputs
        if inputs == 0:
            work.start_ns[i] = 0
            work.cause[i] = -1
            make_ready(work, i, d)
    for d in range(len(work.devices)):
        device = work.devices[d]
        device.peak_bytes = device.used_bytes
        if memory == STOP_WHEN_FULL and device.used_bytes > arrays.memory_bytes[d]:
            return False
    return True


@compiled_inline
def _fits_anyway(arrays: ProblemArrays, work: Workspace) -> bool:
    """No device can run out of memory, in whatever order its ops run."""
    for d in range(len(work.devices)):
        if work.devices[d].most_bytes > arrays.memory_bytes[d]:
            return False
    return True


@compiled_inline
def _start_ops(
    arrays: ProblemArrays, work: Workspace, devices: Ints, now: int, limit_ns: int, memory: int
) -> int:
    """Every touched idle device starts its next op; returns -1, or a step above the limit."""
    for k in range(work.counts[TOUCHED_DEVICES]):
        d = work.touched_devices[index(k)]
        device = work.devices[d]
        device.touched = False
        if device.running >= 0:
            continue
        ready = pop_ready(work, d)
        if ready < 0:
            continue
        i = index(ready)
        op = arrays.ops[i]
        cost = arrays.cost_ns[i, arrays.column[d]]
        end = now + cost
        at_least = max(now + device.work_left_ns, end + op.tail_ns)
        if at_least > limit_ns:
            return int(at_least)
        if end >= HORIZON_NS:
            work.counts[BEYOND_HORIZON] = 1
            return INFEASIBLE_NS
        device.work_left_ns -= cost
        waited = work.start_ns[i] < now  # it was ready before, the device was not
        work.cause[i] = device.previous if waited else work.cause[i]
        work.start_ns[i] = now
        device.running = i
        add_event(work, d, (end << CODE_BITS) | d)
        if memory != IGNORE_MEMORY:
            allocate(arrays, work, d, op.start_bytes, memory)
    work.counts[TOUCHED_DEVICES] = 0
    return -1


@compiled_inline
def _end_op(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    priority: Floats,
    d: int,
    now: int,
    memory: int,
) -> bool:
    """The op that runs on d ends; False where a consumer is on a device that no link leads to."""
    i = index(work.devices[d].running)
    work.devices[d].running = -1
    work.devices[d].previous = i
    set_event(work, d, NO_EVENT)
    touch_device(work, d)
    if memory != IGNORE_MEMORY:
        _release_inputs(arrays, work, i, d)
    begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
    count = len(devices)
    first_sent = work.counts[SENT]
    users = 0  # of the output on this device: consumers here, and transfers
    for k in range(begin, end):
        number = index(k)
        edge = arrays.edges[number]
        destination = index(devices[edge.target])
        if destination == d:
            users += 1
            if memory != IGNORE_MEMORY:
                work.copy_read[number] = i
            arrive(work, edge.target, d, i, now)
            continue
        carrier = work.devices[destination].opened
        if arrays.once_per_destination and begin <= carrier < end:
            transfer = work.transfers[index(carrier)]
            work.transfers[number].next_edge = transfer.next_edge
            transfer.next_edge = number
            if arrays.pairs[transfer.pair].by_priority:
                at = index(carrier)
                work.urgency[at] = max(work.urgency[at], priority[edge.target])
            copy = work.copies[index(count + carrier)]
            copy.size = max(copy.size, edge.bytes)
            copy.users += 1
        else:
            pair = index(d * len(work.devices) + destination)
            if not arrays.pairs[pair].connected:
                return False
            carrier = number
            users += 1
            work.devices[destination].opened = carrier
            transfer = work.transfers[number]
            transfer.next_edge = -1
            if arrays.pairs[pair].by_priority:
                work.urgency[number] = priority[edge.target]
            transfer.pair = pair
            copy = work.copies[index(count + number)]
            copy.size = edge.bytes
            copy.users = 1
            work.sent[index(work.counts[SENT])] = number
            work.counts[SENT] += 1
        if memory != IGNORE_MEMORY:
            work.copy_read[number] = count + carrier
    if memory != IGNORE_MEMORY:
        work.copies[i].users = users
    for k in range(first_sent, work.counts[SENT]):
        request(arrays, work, work.sent[index(k)], now)
    return True


@compiled_inline
def _release_inputs(arrays: ProblemArrays, work: Workspace, i: int, d: int) -> None:
    """Op i, which ran on d, needs its workspace and its inputs no more."""
    freed = arrays.ops[i].workspace_bytes
    for k in range(arrays.ops[i].predecessor_start, arrays.ops[index(i + 1)].predecessor_start):
        copy = work.copies[work.copy_read[arrays.edges[index(k)].predecessor_edge]]
        copy.users -= 1
        freed += copy.size if copy.users == 0 else 0
    work.devices[d].used_bytes -= freed
