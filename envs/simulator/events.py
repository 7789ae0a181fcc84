"""What ends next: the earliest event of every device and queue, and of all other transfers.

A device runs one op at a time and a queue serves one transfer, so each has one slot; transfers that
never wait share one, with a heap behind it. Slots are the leaves of a tournament tree whose root
is the earliest event: an update walks up one path and makes no guesses.
"""

from __future__ import annotations

from envs.compiled import compiled_inline, index
from envs.simulator.arrays import NO_EVENT, UNQUEUED_EVENTS, Workspace


@compiled_inline
def set_event(work: Workspace, slot: int, event: int) -> None:
    """The next event of a slot, ``time << CODE_BITS | code`` or ``NO_EVENT``."""
    events = work.events
    at = slot + (len(events) >> 1)
    events[index(at)] = event
    while at > 1:
        event = min(event, events[index(at ^ 1)])
        at >>= 1
        events[index(at)] = event


@compiled_inline
def add_event(work: Workspace, slot: int, event: int) -> None:
    """Give an event to a slot that has none; no level of the tree waits for the one below."""
    events = work.events
    at = slot + (len(events) >> 1)
    while at > 0:
        events[index(at)] = min(event, events[index(at)])
        at >>= 1


@compiled_inline
def push_unqueued(work: Workspace, slot: int, event: int) -> None:
    """Add the end of a transfer that never waits."""
    _push(work, event)
    set_event(work, slot, work.unqueued_events[0])


@compiled_inline
def pop_unqueued(work: Workspace, slot: int) -> None:
    """Remove the earliest end of such a transfer; there must be one."""
    _pop(work)
    set_event(work, slot, work.unqueued_events[0] if work.counts[UNQUEUED_EVENTS] > 0 else NO_EVENT)


@compiled_inline
def _push(work: Workspace, event: int) -> None:
    """Add ``time << CODE_BITS | code``."""
    events = work.unqueued_events
    hole = work.counts[UNQUEUED_EVENTS]
    work.counts[UNQUEUED_EVENTS] = hole + 1
    while hole > 0:
        parent = (hole - 1) >> 1
        if events[parent] <= event:
            break
        events[hole] = events[parent]
        hole = parent
    events[hole] = event


@compiled_inline
def _pop(work: Workspace) -> int:
    """Remove and return the earliest event; there must be one.

    The hole left at the top walks down to a leaf and the last event is sifted up from there,
    which compares less than sifting it down: it came from a leaf and mostly belongs there.
    """
    events = work.unqueued_events
    top = events[0]
    count = work.counts[UNQUEUED_EVENTS] - 1
    work.counts[UNQUEUED_EVENTS] = count
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
