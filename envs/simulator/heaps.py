"""Two heaps: of events, by time; and of the transfers that wait in one line."""

from __future__ import annotations

from envs.compiled import compiled_inline
from envs.simulator.arrays import EVENTS, Table, Workspace


@compiled_inline
def push_event(work: Workspace, event: int) -> None:
    """Add ``time << CODE_BITS | code``."""
    events = work.events
    hole = work.counts[EVENTS]
    work.counts[EVENTS] = hole + 1
    while hole > 0:
        parent = (hole - 1) >> 1
        if events[parent] <= event:
            break
        events[hole] = events[parent]
        hole = parent
    events[hole] = event


@compiled_inline
def pop_event(work: Workspace) -> int:
    """Remove and return the earliest event; there must be one.

    The hole left at the top walks down to a leaf and the last event is sifted up from there,
    which compares less than sifting it down: it came from a leaf and mostly belongs there.
    """
    events = work.events
    top = events[0]
    count = work.counts[EVENTS] - 1
    work.counts[EVENTS] = count
    event = events[count]
    hole = 0
    child = 1
    while child < count:
        if child + 1 < count and events[child + 1] < events[child]:
            child += 1
        events[hole] = events[child]
        hole = child
        child = 2 * hole + 1
    while hole > 0:
        parent = (hole - 1) >> 1
        if events[parent] <= event:
            break
        events[hole] = events[parent]
        hole = parent
    events[hole] = event
    return int(top)


@compiled_inline
def merge_waiting(transfers: Table, a: int, b: int) -> int:
    """Merge two skew heaps of transfers (-1: empty), first to serve at the root; the new root."""
    if a < 0:
        return b
    if b < 0:
        return a
    if _waits_before(transfers, b, a):
        a, b = b, a
    root = a
    while True:
        upper = transfers[a]
        rest = upper.right
        upper.right = upper.left
        if rest < 0:
            upper.left = b
            return root
        if _waits_before(transfers, b, rest):
            rest, b = b, rest
        upper.left = rest
        a = rest


@compiled_inline
def pop_waiting(work: Workspace, line: int) -> int:
    """Remove and return the transfer that a line serves first; there must be one."""
    first = int(work.queues[line].waiting)
    transfer = work.transfers[first]
    work.queues[line].waiting = merge_waiting(work.transfers, transfer.left, transfer.right)
    return first


@compiled_inline
def push_waiting(work: Workspace, line: int, transfer: int) -> None:
    """Let a transfer wait in a line."""
    work.transfers[transfer].left = -1
    work.transfers[transfer].right = -1
    queue = work.queues[line]
    queue.waiting = merge_waiting(work.transfers, queue.waiting, transfer)


@compiled_inline
def _waits_before(transfers: Table, one: int, other: int) -> bool:
    a, b = transfers[one], transfers[other]
    if a.urgency != b.urgency:
        return bool(a.urgency > b.urgency)
    if a.request_ns != b.request_ns:
        return bool(a.request_ns < b.request_ns)
    return bool(a.sequence < b.sequence)
