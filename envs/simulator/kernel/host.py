"""The step of a cluster with hosts: threads issue the ops one after the other, in one order.

The order of issue (:mod:`envs.simulator.kernel.issue`) decides all times, which follow from a
single sweep: each op finds its start from those it reads.

An op occupies the thread of its device for its launch, then waits in the queue of its device: it
starts when it has been issued, all earlier ops of the device have ended, and its inputs are there.
On a synchronous device the thread waits until the op has ended, so it is never ahead of the device.

A copy in line is issued before its first reader, by the thread of that reader. It starts when the
queues of both devices have drained, and occupies them both; if one of them is synchronous, the
thread waits until the copy has ended. A copy that overlaps is issued after its producer, by the
producer's thread, and starts when the producer has ended. To issue a copy that goes on without it
takes the thread as long as a launch. Either kind of copy also waits for the queues of its link,
which serve in order of issue.

What overlaps and leaves a synchronous device for another one is first written to page-locked
memory. For devices of its own the thread writes small tensors, and others a second thread that it
has for that. Its memory is limited: a large tensor is sent in pieces, while the next is written,
and writing waits until all that is not sent yet of the tensor fits (earlier tensors do not count).
The first thread waits for the end of writing before it issues a reader.

A thread waits for what overlapped and comes from a device of another thread before it issues a
reader. From a synchronous device that has then been written only; the copy is the reader's, in the
queue of its device.

Memory follows the order of issue, as in a caching allocator: an op allocates when it is issued, and
frees what it was the last to read right after.

Cause of a start: the producer of the last copy to arrive, the previous op of the device, or else
the op that the thread waited for last; -1 if it never waited.
"""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_borrowing, compiled_inline, index, int64
from envs.hardware.host import SMALL_BYTES, STAGING_BYTES, STAGING_PARTS
from envs.problem import HORIZON_NS, Ints, transfer_ns
from envs.simulator.kernel.arrays import (
    BEYOND_HORIZON,
    COUNTS,
    FORBIDDEN,
    FULL,
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    RECORD_MEMORY,
    SENT,
    STOP_WHEN_FULL,
    ProblemArrays,
    Workspace,
)
from envs.simulator.kernel.full import allocate, release_inputs
from envs.simulator.kernel.issue import order_of_issue

_NO_LINK: Final = -2
PIECE_BYTES: Final = STAGING_BYTES // STAGING_PARTS


@compiled_borrowing
def host_core(
    arrays: ProblemArrays, work: Workspace, devices: Ints, limit_ns: int, memory: int
) -> int:
    """Return what ``simulate_core`` returns; ``work.order`` must be that of the priorities."""
    if len(devices) > 0 and work.issued[0] >= len(devices):
        order_of_issue(arrays, work)
    if not _reset(arrays, work, devices, memory):
        return INFEASIBLE_NS
    if memory != RECORD_MEMORY and fits_anyway(arrays, work):
        memory = IGNORE_MEMORY
    step_ns = int64(0)
    for k in range(len(devices)):
        i = work.issued[k]
        arrival_ns, producer = _bring_inputs(arrays, work, devices, i, memory)
        if producer == _NO_LINK:
            return INFEASIBLE_NS
        at_least = _start(arrays, work, devices, i, arrival_ns, producer, memory)
        if work.counts[FULL] + work.counts[BEYOND_HORIZON] > 0:
            return INFEASIBLE_NS
        if at_least > limit_ns:
            return at_least
        d = index(devices[i])
        step_ns = max(step_ns, work.devices[d].busy_until_ns)
        overlap = arrays.hosts[d].overlap
        if overlap or memory != IGNORE_MEMORY:
            if not _open_copies(arrays, work, devices, i):
                return INFEASIBLE_NS
            if overlap:
                _copies_beside(arrays, work, len(devices), i, memory)
                if work.counts[FULL] + work.counts[BEYOND_HORIZON] > 0:
                    return INFEASIBLE_NS
    return step_ns


@compiled_inline
def _reset(arrays: ProblemArrays, work: Workspace, devices: Ints, memory: int) -> bool:
    """Reset to time 0; return False where an op may not run on its device or does not fit."""
    for k in range(COUNTS):
        work.counts[k] = 0
    for q in range(len(work.queues)):
        work.queues[q].free_ns = 0
    for k in range(len(work.devices)):
        device = work.devices[k]
        device.busy_until_ns = 0
        device.previous = -1
        device.opened = -1
        device.work_left_ns = 0
        device.used_bytes = 0
        device.most_bytes = 0
        host = work.hosts[k]
        host.clock_ns = 0
        host.written_ns = 0
        host.left_ns = 0
        host.blocked_by = -1
    for k in range(len(devices)):
        i = index(k)
        d = index(devices[i])
        cost = arrays.cost_ns[i, arrays.column[d]]
        if cost == FORBIDDEN:
            return False
        device, place = work.devices[d], arrays.hosts[d]
        device.work_left_ns += cost
        work.hosts[place.thread].left_ns += cost if place.synchronous else arrays.launch_ns[i, d]
        if memory != IGNORE_MEMORY:
            op = arrays.ops[i]
            device.used_bytes += op.resident_bytes
            device.most_bytes += op.most_bytes
        work.ops[i].remaining = 0
    for k in range(len(work.devices)):
        device = work.devices[k]
        device.peak_bytes = device.used_bytes
        if memory == STOP_WHEN_FULL and device.used_bytes > arrays.memory_bytes[k]:
            return False
    return True


@compiled_inline
def fits_anyway(arrays: ProblemArrays, work: Workspace) -> bool:
    """Return whether no device can run out of memory, for any order of its ops."""
    for d in range(len(work.devices)):
        if work.devices[d].most_bytes > arrays.memory_bytes[d]:
            return False
    return True


@compiled_inline
def _bring_inputs(
    arrays: ProblemArrays, work: Workspace, devices: Ints, i: int, memory: int
) -> tuple[int, int]:
    """Make missing copies of op i's inputs; return the last arrival and its producer.

    Inputs made on the same device are there before the device is free. The producer is -1 without
    copies, ``_NO_LINK`` where a link is missing.
    """
    d = index(devices[i])
    thread = arrays.hosts[d].thread
    latest_ns = int64(0)
    producer = int64(-1)
    for k in range(arrays.ops[i].predecessor_start, arrays.ops[index(i + 1)].predecessor_start):
        edge = arrays.edges[index(k)]
        u = edge.predecessor
        if index(devices[u]) == d:
            continue
        if work.ops[u].remaining == 0 and not _open_copies(arrays, work, devices, u):
            return 0, _NO_LINK
        number = index(work.copy_read[edge.predecessor_edge] - len(devices))
        transfer = work.transfers[number]
        awaited_ns = work.awaited_ns[number]
        if awaited_ns > work.hosts[thread].clock_ns:
            work.hosts[thread].clock_ns = awaited_ns
            work.hosts[thread].blocked_by = u
        if transfer.start_ns < 0:
            if awaited_ns >= 0:
                _copy_received(arrays, work, number, memory)
            else:
                _copy_in_line(arrays, work, number, thread, memory)
        arrival_ns = transfer.start_ns + transfer.duration_ns
        if arrival_ns >= latest_ns:
            latest_ns = arrival_ns
            producer = int64(u)
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
    waits = arrays.hosts[pair.source].synchronous or arrays.hosts[pair.destination].synchronous
    issued_ns = host.clock_ns
    if not waits:
        issued_ns += _issue_ns(arrays, pair.source, pair.destination)
        host.clock_ns = issued_ns
    end_ns = _copy(arrays, work, number, max(issued_ns, drained_ns), memory)
    if waits:
        if drained_ns > issued_ns:
            first = source.busy_until_ns >= destination.busy_until_ns
            previous = source.previous if first else destination.previous
            host.blocked_by = previous if previous >= 0 else source.previous
        host.clock_ns = end_ns
    source.busy_until_ns = end_ns
    destination.busy_until_ns = end_ns


@compiled_inline
def _copy_received(arrays: ProblemArrays, work: Workspace, number: int, memory: int) -> None:
    """Copy what a thread wrote for the device of another one, in the queue of that device."""
    pair = arrays.pairs[work.transfers[number].pair]
    destination = work.devices[pair.destination]
    host = work.hosts[arrays.hosts[pair.destination].thread]
    host.clock_ns += _issue_ns(arrays, pair.source, pair.destination)
    start_ns = max(host.clock_ns, destination.busy_until_ns)
    destination.busy_until_ns = _copy(arrays, work, number, start_ns, memory)


@compiled_inline
def _issue_ns(arrays: ProblemArrays, source: int, destination: int) -> int:
    """Return the nanoseconds that issuing a copy which goes on alone occupies its thread."""
    return int(max(arrays.hosts[source].launch_ns, arrays.hosts[destination].launch_ns))


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
    launch_ns = arrays.launch_ns[i, d]
    issued_ns = before_ns + launch_ns
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
        host.left_ns -= launch_ns
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
def _open_copies(arrays: ProblemArrays, work: Workspace, devices: Ints, i: int) -> bool:
    """Say what each reader of op i reads: its output, or a copy; return False without a link."""
    d = index(devices[i])
    begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
    count = len(devices)
    users = 0  # of the output on this device: consumers here, and copies
    for k in range(begin, end):
        number = index(k)
        edge = arrays.edges[number]
        to = index(devices[edge.target])
        if to == d:
            users += 1
            work.copy_read[number] = i
            continue
        carrier = work.devices[to].opened
        if arrays.once_per_destination and begin <= carrier < end:
            copy = work.copies[index(count + carrier)]
            copy.size = max(copy.size, edge.bytes)
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
            work.awaited_ns[number] = -1
            copy = work.copies[index(count + number)]
            copy.size = edge.bytes
            copy.users = 1
        work.copy_read[number] = count + carrier
    work.copies[i].users = users
    work.ops[i].remaining = 1  # its copies are open
    return True


@compiled_inline
def _copies_beside(arrays: ProblemArrays, work: Workspace, count: int, i: int, memory: int) -> None:
    """Make the copies of op i that overlap, in order of their first readers."""
    begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
    for k in range(begin, end):
        number = index(k)
        if work.copy_read[number] != count + k:
            continue
        pair = arrays.pairs[work.transfers[number].pair]
        place, to = arrays.hosts[pair.source], arrays.hosts[pair.destination]
        host = work.hosts[place.thread]
        is_staged = place.synchronous and not to.synchronous
        if is_staged and place.thread != to.thread:
            size = work.copies[index(count + k)].size
            host.clock_ns += transfer_ns(0.0, size, place.staging_bytes_per_s)
            work.awaited_ns[number] = host.clock_ns
            continue
        host.clock_ns += _issue_ns(arrays, pair.source, pair.destination)
        if is_staged:
            _copy_staged(arrays, work, number, memory)
            continue
        start_ns = max(host.clock_ns, work.devices[pair.source].busy_until_ns)
        end_ns = _copy(arrays, work, number, start_ns, memory)
        if place.thread != to.thread:
            work.awaited_ns[number] = end_ns


@compiled_inline
def _copy_staged(arrays: ProblemArrays, work: Workspace, number: int, memory: int) -> None:
    """Write what leaves a synchronous device for another one of its thread, and copy it."""
    pair = arrays.pairs[work.transfers[number].pair]
    place = arrays.hosts[pair.source]
    host = work.hosts[place.thread]
    size = work.copies[index(len(work.ops) + number)].size
    written_ns = transfer_ns(0.0, size, place.staging_bytes_per_s)
    if size <= SMALL_BYTES:
        host.clock_ns += written_ns
        _copy(arrays, work, number, host.clock_ns, memory)
        return
    begin_ns = max(host.clock_ns, host.written_ns)
    host.written_ns = begin_ns + written_ns
    later = max(size - PIECE_BYTES, 0)
    start_ns = begin_ns + transfer_ns(0.0, size - later, place.staging_bytes_per_s)
    sent_ns = transfer_ns(0.0, later, pair.bandwidth_bytes_per_s)
    end_ns = _copy(arrays, work, number, max(start_ns, host.written_ns - sent_ns), memory)
    if size > STAGING_BYTES:
        full_ns = transfer_ns(0.0, STAGING_BYTES, pair.bandwidth_bytes_per_s)
        host.written_ns = max(host.written_ns, end_ns - full_ns)
    work.awaited_ns[number] = host.written_ns
