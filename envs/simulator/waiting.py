"""Heaps of the transfers that wait in one line."""

from __future__ import annotations

from envs.compiled import compiled_inline, index
from envs.simulator.arrays import Table, Workspace


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
        upper = transfers[index(a)]
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
    transfer = work.transfers[index(first)]
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
    a, b = transfers[index(one)], transfers[index(other)]
    if a.urgency != b.urgency:
        return bool(a.urgency > b.urgency)
    if a.request_ns != b.request_ns:
        return bool(a.request_ns < b.request_ns)
    return bool(a.start_ns < b.start_ns)
