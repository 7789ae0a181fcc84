"""Queues of the compiled simulator: ready ops, waiting transfers and the next event.

Each device has its ready ops (one op, or a bitmap over ranks); devices that may start one are
listed. Transfers that wait in one line are a heap.

A device runs one op at a time and a queue serves one transfer, so each has one slot for its next
event; transfers that never wait share one, with a heap behind it. Slots are the leaves of a
tournament tree whose root is the earliest event: an update walks up one path without unpredictable
branches.
"""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_inline, index, int64, lowest_set_bit
from envs.problem import Longs
from envs.simulator.kernel.arrays import (
    NO_EVENT,
    TOUCHED_DEVICES,
    WORD_BITS,
    ProblemArrays,
    Workspace,
)

_LOW_BITS: Final = (1 << WORD_BITS) - 1


@compiled_inline
def make_ready(work: Workspace, i: int, d: int) -> None:
    """Make op i ready on its device d, and let the device pick an op."""
    add_ready(work, i, d)
    touch_device(work, d)


@compiled_inline
def add_ready(work: Workspace, i: int, d: int) -> None:
    """Add op i to the ready ops of device d; a lone op needs no bitmap."""
    device = work.devices[d]
    device.ready += 1
    if device.ready == 1:
        device.lone = i
        return
    if device.lone >= 0:
        set_bit(work, work.ops[index(device.lone)].rank, d)
        device.lone = -1
    set_bit(work, work.ops[i].rank, d)


@compiled_inline
def pop_ready(work: Workspace, d: int) -> int:
    """Remove and return the ready op of lowest rank on a device, or -1."""
    device = work.devices[d]
    if device.ready == 0:
        return -1
    device.ready -= 1
    lone = device.lone
    device.lone = -1
    return int(lone) if lone >= 0 else int(work.order[pop_bit(work, d)])


@compiled_inline
def set_bit(work: Workspace, rank: int, d: int) -> None:
    """Add a rank to the bitmap of a device."""
    word = index(rank >> WORD_BITS)
    group = index(word >> WORD_BITS)
    work.ready[d, word] |= 1 << (rank & _LOW_BITS)
    work.ready_words[d, group] |= 1 << (word & _LOW_BITS)
    device = work.devices[d]
    device.ready_first = min(device.ready_first, group)


@compiled_inline
def pop_bit(work: Workspace, d: int) -> int:
    """Remove and return the lowest rank in the bitmap, which must not be empty."""
    group = work.devices[d].ready_first
    while work.ready_words[d, index(group)] == 0:
        group += 1
    work.devices[d].ready_first = group
    words = work.ready_words[d, index(group)]
    word = index((group << WORD_BITS) + lowest_set_bit(words))
    rank = index((word << WORD_BITS) + lowest_set_bit(work.ready[d, word]))
    work.ready[d, word] &= work.ready[d, word] - 1
    if work.ready[d, word] == 0:
        work.ready_words[d, index(group)] = words & (words - 1)
    return rank


@compiled_inline
def clear_ready(work: Workspace) -> None:
    """Clear ready ops that will not run; a completed step leaves none."""
    for d in range(work.ready.shape[0]):
        for word in range(work.ready.shape[1]):
            work.ready[d, word] = 0
        for word in range(work.ready_words.shape[1]):
            work.ready_words[d, word] = 0


@compiled_inline
def arrive(work: Workspace, v: int, d: int, producer: int, now: int) -> None:
    """Count one more input of v as arrived on its device now."""
    op = work.ops[v]
    op.remaining -= 1
    if op.remaining == 0:
        work.start_ns[v] = now
        work.cause[v] = producer
        make_ready(work, v, d)


@compiled_inline
def touch_device(work: Workspace, d: int) -> None:
    """Let a device pick an op once everything that ends now has been handled."""
    device = work.devices[d]
    if not device.touched:
        device.touched = True
        work.touched_devices[index(work.counts[TOUCHED_DEVICES])] = d
        work.counts[TOUCHED_DEVICES] += 1


@compiled_inline
def merge_waiting(arrays: ProblemArrays, work: Workspace, line: int, a: int, b: int) -> int:
    """Merge two skew heaps of transfers (-1: empty), first to serve on top; return the root."""
    if a < 0:
        return b
    if b < 0:
        return a
    if waits_before(arrays, work, line, b, a):
        a, b = b, a
    root = a
    while True:
        upper = work.transfers[index(a)]
        rest = int64(upper.right)
        upper.right = upper.left
        if rest < 0:
            upper.left = b
            return root
        if waits_before(arrays, work, line, b, rest):
            rest, b = b, rest
        upper.left = rest
        a = rest


@compiled_inline
def pop_waiting(arrays: ProblemArrays, work: Workspace, line: int, first: int) -> int:
    """Remove the transfer ``first`` on top of a heap; return the new root."""
    transfer = work.transfers[index(first)]
    left, right = int64(transfer.left), int64(transfer.right)
    return int(merge_waiting(arrays, work, line, left, right))


@compiled_inline
def push_waiting(
    arrays: ProblemArrays, work: Workspace, line: int, root: int, transfer: int
) -> int:
    """Add a transfer to the heap with this root; return the new root."""
    work.transfers[transfer].left = -1
    work.transfers[transfer].right = -1
    return int(merge_waiting(arrays, work, line, root, int64(transfer)))


@compiled_inline
def waits_before(arrays: ProblemArrays, work: Workspace, line: int, one: int, other: int) -> bool:
    """Compare by urgency if the line uses it, then instant, producer, destination and edge."""
    if arrays.queues[line].by_priority and work.urgency[index(one)] != work.urgency[index(other)]:
        return bool(work.urgency[index(one)] > work.urgency[index(other)])
    a, b = work.transfers[index(one)], work.transfers[index(other)]
    if a.start_ns != b.start_ns:
        return bool(a.start_ns < b.start_ns)
    producer, rival = arrays.edges[index(one)].source, arrays.edges[index(other)].source
    if producer != rival:
        return bool(producer < rival)
    to, elsewhere = arrays.pairs[a.pair].destination, arrays.pairs[b.pair].destination
    return bool(to < elsewhere or (to == elsewhere and one < other))


@compiled_inline
def set_event(events: Longs, slot: int, event: int) -> None:
    """Set the next event of a slot, ``time << CODE_BITS | code`` or ``NO_EVENT``."""
    at = slot + (len(events) >> 1)
    events[index(at)] = event
    while at > 1:
        event = min(event, events[index(at ^ 1)])
        at >>= 1
        events[index(at)] = event


@compiled_inline
def add_event(events: Longs, slot: int, event: int) -> None:
    """Set the event of a slot that has none; the levels of the tree are updated independently."""
    at = slot + (len(events) >> 1)
    while at > 0:
        events[index(at)] = min(event, events[index(at)])
        at >>= 1


@compiled_inline
def push_event(heap: Longs, count: int, event: int) -> int:
    """Add an event to a heap of ``count``; return the new count."""
    hole = count
    while hole > 0:
        parent = (hole - 1) >> 1
        if heap[index(parent)] <= event:
            break
        heap[index(hole)] = heap[index(parent)]
        hole = parent
    heap[index(hole)] = event
    return count + 1


@compiled_inline
def pop_event(heap: Longs, count: int) -> int:
    """Remove the earliest event of a heap of ``count``, above 0; return the new count.

    An empty heap has ``NO_EVENT`` on top. The hole left at the top walks down to a leaf and the
    last event is sifted up from there, which compares less than sifting it down: it came from a
    leaf and mostly belongs there.
    """
    count -= 1
    event = heap[index(count)]
    hole = 0
    child = 1
    while child < count:
        if child + 1 < count and heap[index(child + 1)] < heap[index(child)]:
            child += 1
        heap[index(hole)] = heap[index(child)]
        hole = child
        child = 2 * hole + 1
    while hole > 0:
        parent = (hole - 1) >> 1
        if heap[index(parent)] <= event:
            break
        heap[index(hole)] = heap[index(parent)]
        hole = parent
    heap[index(hole)] = event if count > 0 else NO_EVENT
    return count
