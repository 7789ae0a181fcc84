"""Transfers: they wait in the line of their link, occupy it, and end at their consumers."""

from __future__ import annotations

from envs.compiled import compiled_inline, index, int64
from envs.nanoseconds import HORIZON_NS, transfer_ns
from envs.simulator.arrays import (
    BEYOND_HORIZON,
    CODE_BITS,
    FULL,
    IGNORE_MEMORY,
    NO_EVENT,
    STOP_WHEN_FULL,
    TOUCHED_QUEUES,
    UNQUEUED,
    UNQUEUED_EVENTS,
    ProblemArrays,
    Workspace,
)
from envs.simulator.events import add_event, pop_event, push_event, set_event
from envs.simulator.ready import arrive
from envs.simulator.waiting import pop_waiting, push_waiting


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
    push_waiting(arrays, work, line, number)
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
            number = index(pop_waiting(arrays, work, line))
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
    passed_over = 0
    while queue.idle_ports > 1 and queue.waiting >= 0:
        number = index(pop_waiting(arrays, work, line))
        pair = arrays.pairs[work.transfers[number].pair]
        out, into = work.queues[index(pair.queue)], work.queues[index(pair.second_queue)]
        if out.busy or into.busy:
            work.unqueued[index(passed_over)] = number
            passed_over += 1
        else:
            out.busy = True
            into.busy = True
            queue.idle_ports -= 2
            _start_transfer(arrays, work, number, now, memory)
    for k in range(passed_over):
        push_waiting(arrays, work, line, work.unqueued[index(k)])


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
