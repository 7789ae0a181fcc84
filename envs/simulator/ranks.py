"""Ranks of ops by priority: highest first, ties by lowest index."""

from __future__ import annotations

from envs.compiled import compiled_inline
from envs.simulator.arrays import Floats, Indices, Workspace


@compiled_inline
def rank_ops(work: Workspace, priority: Floats) -> None:
    """Update ``rank`` and ``order`` of the workspace for ``priority`` (N,).

    A natural merge sort that begins with the previous order: nothing to do for the same priorities,
    one or two merges after a few changes.
    """
    ranked, order = work.ranked_priority, work.order
    changed = False
    for i in range(len(priority)):
        if priority[i] != ranked[i]:
            ranked[i] = priority[i]
            changed = True
    if not changed:
        return
    runs = _find_runs(order, ranked, work.run_start)
    source, target = order, work.merged
    while runs > 1:
        runs = _merge_pairs(source, target, ranked, work.run_start, runs)
        source, target = target, source
    for k in range(len(order)):
        i = source[k]
        order[k] = i
        work.ops[i].rank = k


@compiled_inline
def _precedes(a: int, b: int, priority: Floats) -> bool:
    return priority[a] > priority[b] or (priority[a] == priority[b] and a < b)


@compiled_inline
def _find_runs(order: Indices, priority: Floats, run_start: Indices) -> int:
    """Cut ``order`` into sorted runs, with their bounds in run_start; return their number."""
    runs = 1
    run_start[0] = 0
    for k in range(1, len(order)):
        if not _precedes(order[k - 1], order[k], priority):
            run_start[runs] = k
            runs += 1
    run_start[runs] = len(order)
    return runs


@compiled_inline
def _merge_pairs(
    source: Indices, target: Indices, priority: Floats, run_start: Indices, runs: int
) -> int:
    """Merge runs 0 and 1, 2 and 3, ... of source into target; return how many are left."""
    left_over = 0
    for first in range(0, runs, 2):
        a, a_end = run_start[first], run_start[first + 1]
        b = a_end
        b_end = run_start[min(first + 2, runs)]
        run_start[left_over] = a
        left_over += 1
        k = a
        while a < a_end and b < b_end:  # branch-free body: branches would be unpredictable
            one, other = source[a], source[b]
            p, q = priority[one], priority[other]
            takes_one = (p > q) | ((p == q) & (one < other))
            target[k] = one if takes_one else other
            a += takes_one
            b += 1 - takes_one
            k += 1
        for rest in range(a, a_end):
            target[k] = source[rest]
            k += 1
        for rest in range(b, b_end):
            target[k] = source[rest]
            k += 1
    run_start[left_over] = len(source)
    return left_over
