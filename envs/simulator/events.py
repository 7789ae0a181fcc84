"""The next event of every device and queue, and of all other transfers.

A device runs one op at a time and a queue serves one transfer, so each has one slot; transfers that
never wait share one, with a heap behind it. Slots are the leaves of a tournament tree whose root is
the earliest event: an update walks up one path without unpredictable branches.
"""

from __future__ import annotations

from envs.compiled import compiled_inline, index
from envs.simulator.arrays import NO_EVENT, Longs


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
