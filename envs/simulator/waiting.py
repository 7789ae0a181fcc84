"""Heaps of the transfers that wait in one line."""

from __future__ import annotations

from envs.compiled import compiled_inline, index, int64
from envs.simulator.arrays import ProblemArrays, Workspace


@compiled_inline
def merge_waiting(arrays: ProblemArrays, work: Workspace, line: int, a: int, b: int) -> int:
    """Merge two skew heaps of transfers (-1: empty), first to serve on top; return the root."""
    if a < 0:
        return b
    if b < 0:
        return a
    if _waits_before(arrays, work, line, b, a):
        a, b = b, a
    root = a
    while True:
        upper = work.transfers[index(a)]
        rest = int64(upper.right)
        upper.right = upper.left
        if rest < 0:
            upper.left = b
            return root
        if _waits_before(arrays, work, line, b, rest):
            rest, b = b, rest
        upper.left = rest
        a = rest


@compiled_inline
def pop_waiting(arrays: ProblemArrays, work: Workspace, line: int) -> int:
    """Remove and return the transfer that a line serves first; there must be one."""
    first = int(work.queues[line].waiting)
    transfer = work.transfers[index(first)]
    left, right = int64(transfer.left), int64(transfer.right)
    work.queues[line].waiting = merge_waiting(arrays, work, line, left, right)
    return first


@compiled_inline
def push_waiting(arrays: ProblemArrays, work: Workspace, line: int, transfer: int) -> None:
    """Add a transfer to a line."""
    work.transfers[transfer].left = -1
    work.transfers[transfer].right = -1
    queue = work.queues[line]
    queue.waiting = merge_waiting(arrays, work, line, int64(queue.waiting), int64(transfer))


@compiled_inline
def _waits_before(arrays: ProblemArrays, work: Workspace, line: int, one: int, other: int) -> bool:
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
