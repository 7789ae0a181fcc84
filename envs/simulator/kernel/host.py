"""The step of a cluster with hosts: threads issue the ops one after the other, in one order.

Of the ops whose inputs have been issued, that of highest priority is issued next, ties by index.
That order decides all times, so they follow from a single sweep over the ops, without events.

An op occupies the thread of its device for ``launch_ns``, then waits in the queue of its device: it
starts when it has been issued, all earlier ops of the device have ended, and its inputs are there.
On a synchronous device the thread waits until the op has ended, so it is never ahead of the device.

A copy in line is issued before its first reader, by the thread of that reader. It starts when the
queues of both devices have drained, and occupies them both; if one of them is synchronous, the
thread waits until the copy has ended. A copy that overlaps is issued after its producer, and starts
when the producer has ended. Either kind also waits for the queues of its link, which serve in order
of issue.

Memory follows the order of issue, as in a caching allocator: an op allocates when it is issued, and
frees what it was the last to read right after.

Cause of a start: the producer of the last copy to arrive, the previous op of the device, or else
the op that the thread waited for last; -1 if it never waited.
"""

from __future__ import annotations

from envs.compiled import compiled_borrowing, compiled_inline, index, int64
from envs.problem import HORIZON_NS, Ints, transfer_ns
from envs.simulator.kernel.arrays import (
    BEYOND_HORIZON,
    FULL,
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    SENT,
    ProblemArrays,
    Workspace,
)
from envs.simulator.kernel.full import allocate, release_inputs
from envs.simulator.kernel.queues import add_ready, pop_ready


@compiled_borrowing
def host_core(
    arrays: ProblemArrays, work: Workspace, devices: Ints, limit_ns: int, memory: int
) -> int:
    """Return what ``simulate_core`` returns; the workspace must be reset."""
    _reset(arrays, work, devices)
    step_ns = int64(0)
    issued = int64(0)
    while True:
        ready = pop_ready(work, 0)
        if ready < 0:
            return step_ns
        i = index(ready)
        work.issued[index(issued)] = i
        issued += 1
        arrival_ns, producer = _bring_inputs(arrays, work, devices, i, memory)
        at_least = _start(arrays, work, devices, i, arrival_ns, producer, memory)
        if work.counts[FULL] + work.counts[BEYOND_HORIZON] > 0:
            return INFEASIBLE_NS
        if at_least > limit_ns:
            return at_least
        step_ns = max(step_ns, work.devices[index(devices[i])].busy_until_ns)
        if not _open_copies(arrays, work, devices, i, memory):
            return INFEASIBLE_NS
        if work.counts[FULL] + work.counts[BEYOND_HORIZON] > 0:
            return INFEASIBLE_NS


@compiled_inline
def _reset(arrays: ProblemArrays, work: Workspace, devices: Ints) -> None:
    """Reset threads and queues; put the ready ops of all devices into the row of the first."""
    for q in range(len(work.queues)):
        work.queues[q].free_ns = 0
    for k in range(len(work.devices)):
        d = index(k)
        work.devices[d].busy_until_ns = 0
        host = work.hosts[d]
        host.clock_ns = 0
        host.left_ns = 0
        host.blocked_by = -1
        while d > 0:
            ready = pop_ready(work, d)
            if ready < 0:
                break
            add_ready(work, index(ready), 0)
    for k in range(len(devices)):
        d = index(devices[k])
        place = arrays.hosts[d]
        host_ns = arrays.cost_ns[k, arrays.column[d]] if place.synchronous else place.launch_ns
        work.hosts[place.thread].left_ns += host_ns


@compiled_inline
def _bring_inputs(
    arrays: ProblemArrays, work: Workspace, devices: Ints, i: int, memory: int
) -> tuple[int, int]:
    """Make copies of op i's inputs that do not overlap; return the last arrival and its producer.

    Inputs made on the same device are there before the device is free.
    """
    thread = arrays.hosts[index(devices[i])].thread
    latest_ns = int64(0)
    producer = int64(-1)
    for k in range(arrays.ops[i].predecessor_start, arrays.ops[index(i + 1)].predecessor_start):
        copy = work.copy_read[arrays.edges[index(k)].predecessor_edge]
        if copy < len(devices):
            continue
        number = index(copy - len(devices))
        transfer = work.transfers[number]
        if transfer.start_ns < 0:
            _copy_in_line(arrays, work, number, thread, memory)
        arrival_ns = transfer.start_ns + transfer.duration_ns
        if arrival_ns >= latest_ns:
            latest_ns = arrival_ns
            producer = int64(arrays.edges[index(k)].predecessor)
    return latest_ns, producer


@compiled_inline
def _copy_in_line(
    arrays: ProblemArrays, work: Workspace, number: int, thread: int, memory: int
) -> None:
    """Copy between the queues of two devices, and through the thread if one is synchronous."""
    pair = arrays.pairs[work.transfers[number].pair]
    source, destination = work.devices[pair.source], work.devices[pair.destination]
    host = work.hosts[thread]
    drained_ns = max(source.busy_until_ns, destination.busy_until_ns)
    end_ns = _copy(arrays, work, number, max(host.clock_ns, drained_ns), memory)
    if arrays.hosts[pair.source].synchronous or arrays.hosts[pair.destination].synchronous:
        if drained_ns > host.clock_ns:
            first = source.busy_until_ns >= destination.busy_until_ns
            previous = source.previous if first else destination.previous
            host.blocked_by = previous if previous >= 0 else source.previous
        host.clock_ns = end_ns
    source.busy_until_ns = end_ns
    destination.busy_until_ns = end_ns


@compiled_inline
def _copy(arrays: ProblemArrays, work: Workspace, number: int, now: int, memory: int) -> int:
    """Start a copy once its link is free, now or later; return its end."""
    transfer = work.transfers[number]
    pair = arrays.pairs[transfer.pair]
    size = work.copies[index(len(work.ops) + number)].size
    start_ns = int64(now)
    if pair.queue >= 0:
        start_ns = max(start_ns, work.queues[index(pair.queue)].free_ns)
    if pair.second_queue >= 0:
        start_ns = max(start_ns, work.queues[index(pair.second_queue)].free_ns)
    duration_ns = transfer_ns(pair.latency_s, size, pair.bandwidth_bytes_per_s)
    end_ns = start_ns + duration_ns
    if end_ns >= HORIZON_NS:
        work.counts[BEYOND_HORIZON] = 1
    if pair.queue >= 0:
        work.queues[index(pair.queue)].free_ns = end_ns
    if pair.second_queue >= 0:
        work.queues[index(pair.second_queue)].free_ns = end_ns
    transfer.start_ns = start_ns
    transfer.duration_ns = duration_ns
    work.sent[index(work.counts[SENT])] = number
    work.counts[SENT] += 1
    if memory != IGNORE_MEMORY:
        allocate(arrays, work, pair.destination, size, memory)
        output = work.copies[arrays.edges[number].source]
        output.users -= 1
        work.devices[pair.source].used_bytes -= output.size if output.users == 0 else 0
    return int(end_ns)


@compiled_inline
def _start(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    i: int,
    arrival_ns: int,
    producer: int,
    memory: int,
) -> int:
    """Start op i, whose inputs are all sent; return the least time that the step takes."""
    d = index(devices[i])
    device, place = work.devices[d], arrays.hosts[d]
    host = work.hosts[place.thread]
    op = arrays.ops[i]
    cost = arrays.cost_ns[i, arrays.column[d]]
    before_ns = host.clock_ns
    issued_ns = before_ns + place.launch_ns
    start_ns = max(issued_ns, device.busy_until_ns, arrival_ns)
    end_ns = start_ns + cost
    if end_ns >= HORIZON_NS:
        work.counts[BEYOND_HORIZON] = 1
    at_least = max(start_ns + device.work_left_ns, end_ns + op.tail_ns)
    if place.synchronous:
        at_least = max(at_least, start_ns + host.left_ns)
        host.left_ns -= cost
    else:
        at_least = max(at_least, before_ns + host.left_ns)
        host.left_ns -= place.launch_ns
    if producer >= 0 and start_ns == arrival_ns:
        work.cause[i] = producer
    elif device.previous >= 0 and start_ns == device.busy_until_ns:
        work.cause[i] = device.previous
    else:
        work.cause[i] = host.blocked_by
    work.start_ns[i] = start_ns
    host.clock_ns = issued_ns
    if place.synchronous:
        host.clock_ns = end_ns
        host.blocked_by = i
    device.work_left_ns -= cost
    device.busy_until_ns = end_ns
    device.previous = i
    if memory != IGNORE_MEMORY:
        allocate(arrays, work, d, op.start_bytes, memory)
        release_inputs(arrays, work, i, d)
    return int(at_least)


@compiled_inline
def _open_copies(
    arrays: ProblemArrays, work: Workspace, devices: Ints, i: int, memory: int
) -> bool:
    """Make the readers of op i ready, and open its copies; return False where a link is missing.

    Copies that overlap are issued at once, in order of their first readers.
    """
    d = index(devices[i])
    overlap = arrays.hosts[d].overlap
    begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
    count = len(devices)
    users = 0  # of the output on this device: consumers here, and copies
    for k in range(begin, end):
        number = index(k)
        v = arrays.edges[number].target
        to = index(devices[v])
        op = work.ops[v]
        op.remaining -= 1
        if op.remaining == 0:
            add_ready(work, v, 0)
        if to == d:
            users += 1
            work.copy_read[number] = i
            continue
        carrier = work.devices[to].opened
        if arrays.once_per_destination and begin <= carrier < end:
            copy = work.copies[index(count + carrier)]
            copy.size = max(copy.size, arrays.edges[number].bytes)
            copy.users += 1
        else:
            pair = index(d * len(work.devices) + to)
            if not arrays.pairs[pair].connected:
                return False
            carrier = number
            users += 1
            work.devices[to].opened = carrier
            work.transfers[number].pair = pair
            work.transfers[number].start_ns = -1
            copy = work.copies[index(count + number)]
            copy.size = arrays.edges[number].bytes
            copy.users = 1
        work.copy_read[number] = count + carrier
    work.copies[i].users = users
    if overlap:
        for k in range(begin, end):
            carrier = work.copy_read[index(k)]
            if carrier == count + k:
                _copy(arrays, work, index(k), work.devices[d].busy_until_ns, memory)
    return True
