"""The full path: the end of every op and every transfer is an event.

It supports every link, and follows memory over time. Transfers wait in the line of their link,
occupy it, and end at their consumers.
"""

from __future__ import annotations

from typing import Any, Final

from envs.compiled import compiled_borrowing, compiled_inline, index, int64
from envs.problem import HORIZON_NS, Floats, Ints, transfer_ns
from envs.simulator.kernel.arrays import (
    BEYOND_HORIZON,
    CODE_BITS,
    FULL,
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_EVENT,
    SENT,
    STOP_WHEN_FULL,
    TOUCHED_DEVICES,
    TOUCHED_QUEUES,
    UNQUEUED,
    UNQUEUED_EVENTS,
    WAITING_PAIRS,
    ProblemArrays,
    Workspace,
)
from envs.simulator.kernel.load import extra_ns, shares_machine
from envs.simulator.kernel.queues import (
    add_event,
    arrive,
    pop_event,
    pop_ready,
    pop_waiting,
    push_event,
    push_waiting,
    set_event,
    touch_device,
    waits_before,
)


@compiled_inline
def request(arrays: ProblemArrays, work: Workspace, number: int, now: int) -> None:
    """Put a transfer into its line, or on the list of those that never wait."""
    transfer = work.transfers[number]
    pair = arrays.pairs[transfer.pair]
    size = work.copies[index(len(work.ops) + number)].size
    transfer.duration_ns = transfer_ns(pair.latency_s, size, pair.bandwidth_bytes_per_s)
    transfer.start_ns = now
    if pair.line < 0:
        work.unqueued[index(work.counts[UNQUEUED])] = number
        work.counts[UNQUEUED] += 1
        return
    line = index(pair.line)
    queue = work.queues[line]
    if arrays.queues[line].ports > 1:
        at = index(transfer.pair)
        if work.waiting[at] < 0:
            work.waiting_pairs[index(work.counts[WAITING_PAIRS])] = at
            work.counts[WAITING_PAIRS] += 1
        work.waiting[at] = push_waiting(arrays, work, line, int64(work.waiting[at]), number)
        if not _has_idle_ports(work, pair):
            return  # the line is touched where one becomes idle
    else:
        queue.waiting = push_waiting(arrays, work, line, int64(queue.waiting), number)
    _touch_queue(work, line)


@compiled_inline
def start_transfers(arrays: ProblemArrays, work: Workspace, now: int, memory: int) -> None:
    """Start transfers that never wait, and the next ones of all touched lines."""
    for k in range(work.counts[UNQUEUED]):
        _start_transfer(arrays, work, work.unqueued[index(k)], now, memory)
    work.counts[UNQUEUED] = 0
    for k in range(work.counts[TOUCHED_QUEUES]):
        line = work.touched_queues[index(k)]
        queue = work.queues[line]
        queue.touched = False
        if arrays.queues[line].ports > 1:
            _serve_ports(arrays, work, line, now, memory)
        elif not queue.busy and queue.waiting >= 0:
            queue.busy = True
            number = index(queue.waiting)
            queue.waiting = pop_waiting(arrays, work, line, int64(queue.waiting))
            _start_transfer(arrays, work, number, now, memory)
    work.counts[TOUCHED_QUEUES] = 0


@compiled_inline
def end_transfer(
    arrays: ProblemArrays, work: Workspace, number: int, now: int, memory: int
) -> None:
    """End a transfer: free the link, and deliver the copy to its consumers."""
    pair = arrays.pairs[work.transfers[number].pair]
    if pair.line < 0:
        count = pop_event(work.unqueued_events, work.counts[UNQUEUED_EVENTS])
        work.counts[UNQUEUED_EVENTS] = count
        set_event(work.events, len(work.devices) + len(work.queues), work.unqueued_events[0])
    else:
        line = index(pair.line)
        set_event(work.events, len(work.devices) + pair.queue, int64(NO_EVENT))
        work.queues[index(pair.queue)].busy = False
        if arrays.queues[line].ports > 1:
            work.queues[index(pair.second_queue)].busy = False
            work.queues[line].idle_ports += 2
        _touch_queue(work, line)
    edge = arrays.edges[number]
    if memory != IGNORE_MEMORY:
        output = work.copies[edge.source]
        output.users -= 1
        work.devices[pair.source].used_bytes -= output.size if output.users == 0 else 0
    arrive(work, edge.target, pair.destination, edge.source, now)
    other = work.transfers[number].next_edge
    while other >= 0:
        arrive(work, arrays.edges[index(other)].target, pair.destination, edge.source, now)
        other = work.transfers[index(other)].next_edge


@compiled_inline
def _serve_ports(arrays: ProblemArrays, work: Workspace, line: int, now: int, memory: int) -> None:
    """Start the transfers of a line whose two ports are idle, in order."""
    queue = work.queues[line]
    while queue.idle_ports > 1:
        k = _next_with_idle_ports(arrays, work, line)
        if k < 0:
            return
        at = work.waiting_pairs[index(k)]
        number = index(work.waiting[at])
        work.waiting[at] = pop_waiting(arrays, work, line, int64(work.waiting[at]))
        if work.waiting[at] < 0:
            work.counts[WAITING_PAIRS] -= 1
            last = work.waiting_pairs[index(work.counts[WAITING_PAIRS])]
            work.waiting_pairs[index(k)] = last
        queue.idle_ports -= 2
        work.queues[index(arrays.pairs[at].queue)].busy = True
        work.queues[index(arrays.pairs[at].second_queue)].busy = True
        _start_transfer(arrays, work, number, now, memory)


@compiled_inline
def _next_with_idle_ports(arrays: ProblemArrays, work: Workspace, line: int) -> int:
    """Return which waiting pair has the first transfer of a line whose ports are idle, or -1."""
    best, first = int64(-1), int64(-1)
    for k in range(work.counts[WAITING_PAIRS]):
        at = work.waiting_pairs[index(k)]
        if arrays.pairs[at].line != line or not _has_idle_ports(work, arrays.pairs[at]):
            continue
        waiting = int64(work.waiting[at])
        if first < 0 or waits_before(arrays, work, line, waiting, first):
            best, first = int64(k), waiting
    return int(best)


@compiled_inline
def _has_idle_ports(work: Workspace, pair: Any) -> bool:
    """Return whether both ports of a pair of devices are idle."""
    out, into = work.queues[index(pair.queue)], work.queues[index(pair.second_queue)]
    return not (out.busy or into.busy)


@compiled_inline
def _start_transfer(
    arrays: ProblemArrays, work: Workspace, number: int, now: int, memory: int
) -> None:
    """Start a transfer: allocate its copy at the destination, and schedule its end."""
    transfer = work.transfers[number]
    transfer.start_ns = now
    end = now + transfer.duration_ns
    if end >= HORIZON_NS:
        work.counts[BEYOND_HORIZON] = 1
        return
    event = (end << CODE_BITS) | (len(work.devices) + number)
    pair = arrays.pairs[transfer.pair]
    if pair.queue < 0:
        count = push_event(work.unqueued_events, work.counts[UNQUEUED_EVENTS], event)
        work.counts[UNQUEUED_EVENTS] = count
        set_event(work.events, len(work.devices) + len(work.queues), work.unqueued_events[0])
    else:
        add_event(work.events, len(work.devices) + pair.queue, event)
    if memory != IGNORE_MEMORY:
        size = work.copies[index(len(work.ops) + number)].size
        allocate(arrays, work, pair.destination, size, memory)


@compiled_inline
def _touch_queue(work: Workspace, line: int) -> None:
    """Let a line serve once everything that ends now has been handled."""
    queue = work.queues[line]
    if not queue.touched:
        queue.touched = True
        work.touched_queues[index(work.counts[TOUCHED_QUEUES])] = line
        work.counts[TOUCHED_QUEUES] += 1


@compiled_inline
def allocate(arrays: ProblemArrays, work: Workspace, d: int, size: int, memory: int) -> None:
    """Allocate memory on a device; set ``counts[FULL]`` if too little is to stop the step."""
    device = work.devices[d]
    device.used_bytes += size
    if device.used_bytes > device.peak_bytes:
        device.peak_bytes = device.used_bytes
        if memory == STOP_WHEN_FULL and device.used_bytes > arrays.memory_bytes[d]:
            work.counts[FULL] = 1


_CODE_MASK: Final = (1 << CODE_BITS) - 1


@compiled_inline
def full_core(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    priority: Floats,
    limit_ns: int,
    memory: int,
) -> int:
    """Return what ``simulate_core`` returns; the workspace must be reset."""
    device_count = len(arrays.memory_bytes)
    now = int64(0)
    while True:
        beyond = _start_ops(arrays, work, devices, now, limit_ns, memory)
        if beyond >= 0:
            return beyond
        start_transfers(arrays, work, now, memory)
        if work.counts[FULL] + work.counts[BEYOND_HORIZON] > 0:
            return INFEASIBLE_NS
        event = work.events[1]
        if event == NO_EVENT:
            return now
        now = event >> CODE_BITS
        while event >> CODE_BITS == now and event != NO_EVENT:
            code = index(event & _CODE_MASK)
            if code >= device_count:
                number = index(code - device_count)
                end_transfer(arrays, work, number, now, memory)
            elif not _end_op(arrays, work, devices, priority, code, now, memory):
                return INFEASIBLE_NS
            event = work.events[1]


@compiled_inline
def _start_ops(
    arrays: ProblemArrays, work: Workspace, devices: Ints, now: int, limit_ns: int, memory: int
) -> int:
    """Start the next op of every touched idle device; return -1, or the final answer."""
    started = 0
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
        if arrays.has_load:
            work.end_ns[i] = end
            work.touched_devices[index(started)] = d  # read already: started <= k
            started += 1
        else:
            add_event(work.events, int64(d), (end << CODE_BITS) | d)
        if memory != IGNORE_MEMORY:
            allocate(arrays, work, d, op.start_bytes, memory)
    work.counts[TOUCHED_DEVICES] = 0
    return _add_load(arrays, work, started, limit_ns) if arrays.has_load else -1


@compiled_borrowing
def _add_load(arrays: ProblemArrays, work: Workspace, started: int, limit_ns: int) -> int:
    """Let ops that start now take longer where others compute; return -1, or the final answer."""
    for k in range(started):
        d = work.touched_devices[index(k)]
        device = work.devices[d]
        i = index(device.running)
        busy = 0
        others = 0
        for other in range(len(work.devices)):
            if shares_machine(arrays, d, other):
                others += 1
                busy += work.devices[index(other)].running >= 0
        end = work.end_ns[i] + extra_ns(arrays, i, d, busy, others)
        at_least = end + max(device.work_left_ns, arrays.ops[i].tail_ns)
        if at_least > limit_ns:
            return int(at_least)
        if end >= HORIZON_NS:
            work.counts[BEYOND_HORIZON] = 1
            return INFEASIBLE_NS
        work.end_ns[i] = end
        add_event(work.events, int64(d), (end << CODE_BITS) | d)
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
    """End the op on d; return False if no link leads from d to a consumer's device."""
    i = index(work.devices[d].running)
    work.devices[d].running = -1
    work.devices[d].previous = i
    set_event(work.events, int64(d), int64(NO_EVENT))
    touch_device(work, d)
    if memory != IGNORE_MEMORY:
        release_inputs(arrays, work, i, d)
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
def release_inputs(arrays: ProblemArrays, work: Workspace, i: int, d: int) -> None:
    """Free the workspace and the inputs of op i, which ran on d."""
    freed = arrays.ops[i].workspace_bytes
    for k in range(arrays.ops[i].predecessor_start, arrays.ops[index(i + 1)].predecessor_start):
        copy = work.copies[work.copy_read[arrays.edges[index(k)].predecessor_edge]]
        copy.users -= 1
        freed += copy.size if copy.users == 0 else 0
    work.devices[d].used_bytes -= freed
