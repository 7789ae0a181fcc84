"""The simulation of one step of a placed graph, compiled, in integer nanoseconds.

A step takes the express path (:mod:`envs.simulator.kernel.express`) where that is exact, else the
full path (:mod:`envs.simulator.kernel.full`); their answers, starts and causes are the same.
Clusters with hosts have rules of their own, see :mod:`envs.simulator.kernel.host`.

Time advances from instant to instant. An instant is a number of rounds (more than one only where
something takes no time): first everything that ends is handled, then every idle device picks its
ready op of highest priority (ties by lowest index, :func:`rank_ops`), and every idle queue its
first waiting transfer. A queue serves in order of request (instant, then producer, destination and
edge), or, by priority, the transfer whose highest-priority consumer on the destination is highest,
ties in order of request. On a half-duplex "egress" link, or one with ``ingress``, a transfer needs
the ports of both its ends; waiting transfers of the link are checked in queue order, and each with
two idle ports starts.

Memory of a device (in a round, frees come before allocations): parameters, gradients and optimizer
state of its ops throughout; held bytes of an op from its start on; its output from its start until
the last consumer there and the last transfer of it have ended (to the end of the step without
consumers); its workspace while it runs; a received copy from the start of its transfer until its
last consumer there has ended.

All functions can be called from compiled code.
"""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_borrowing, compiled_inline, index
from envs.problem import Floats, Ints, Longs
from envs.simulator.kernel.arrays import (
    BEYOND_HORIZON,
    COUNTS,
    EXPRESS,
    FORBIDDEN,
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_EVENT,
    OVERFULL_NS,
    RANK_EXCESS,
    RECORD_MEMORY,
    STOP_WHEN_FULL,
    WAITING_PAIRS,
    Indices,
    ProblemArrays,
    Workspace,
)
from envs.simulator.kernel.express import GIVES_UP, express_core
from envs.simulator.kernel.full import full_core
from envs.simulator.kernel.host import fits_anyway, host_core
from envs.simulator.kernel.queues import clear_ready, make_ready


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
    work.issued[0] = len(order)  # no op: the order of issue is to be found again
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


TO_REST: Final = 0
RESTED: Final = 1
LONGEST_REST: Final = 15
LARGEST_SHARE: Final = 1000.0


@compiled_inline
def simulate_core(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    priority: Floats,
    limit_ns: int,
    memory: int,
) -> int:
    """Simulate one step and return its nanoseconds.

    Args:
        arrays: arrays of the problem, see ``arrays_of``.
        work: a workspace for the problem, see ``workspace_for``; holds the schedule afterwards,
            unless the step was aborted.
        devices: (N,) int32, each in 0 .. D-1 (not checked).
        priority: (N,) float64 without nan (not checked).
        limit_ns: abort as soon as the step provably takes longer; ``NO_LIMIT_NS`` for never.
        memory: ``IGNORE_MEMORY``, ``STOP_WHEN_FULL`` (a placement that does not fit is
            infeasible), ``RECORD_MEMORY`` (peaks are recorded and never stop anything) or
            ``RANK_EXCESS`` (peaks above a device's memory are recorded; a placement that does
            not fit takes ``OVERFULL_NS`` and more, growing with the memory that is missing).

    Returns:
        The step if it is at most ``limit_ns``, else some number above ``limit_ns`` (unless that
        is the largest number). ``INFEASIBLE_NS``: an op is where it may not run, an edge joins
        devices without a link, or memory does not suffice; or, with
        ``work.counts[BEYOND_HORIZON]`` set, the step reaches ``HORIZON_NS``.
    """
    rank_ops(work, priority)
    ranks_excess = memory == RANK_EXCESS
    if arrays.has_hosts:
        step_ns = host_core(arrays, work, devices, limit_ns, memory)
        if ranks_excess and step_ns <= limit_ns and step_ns != INFEASIBLE_NS:
            return _ranked(arrays, work, step_ns)
        return step_ns
    if not _reset(arrays, work, devices, memory):
        clear_ready(work)
        return INFEASIBLE_NS
    if memory != RECORD_MEMORY and fits_anyway(arrays, work):
        memory = IGNORE_MEMORY
    answer = GIVES_UP
    if arrays.express and _takes_express(work, memory):
        follows_memory = memory != IGNORE_MEMORY
        answer = express_core(arrays, work, devices, limit_ns, follows_memory)
        if follows_memory:
            _rest_if(work, answer == GIVES_UP)
        if answer == GIVES_UP:
            clear_ready(work)
            _reset(arrays, work, devices, memory)
        else:
            work.counts[EXPRESS] = 1
    if answer == GIVES_UP:
        answer = full_core(arrays, work, devices, priority, limit_ns, memory)
    if answer > limit_ns or answer == INFEASIBLE_NS:
        clear_ready(work)
    elif ranks_excess:
        return _ranked(arrays, work, answer)
    return answer


@compiled_borrowing
def simulate_batch(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    priority: Floats,
    limit_ns: int,
    memory: int,
    step_ns: Longs,
) -> int:
    """Simulate B placements (B, N) into ``step_ns`` (B,), see :func:`simulate_core`.

    Returns:
        -1, or the first placement whose step reaches ``HORIZON_NS``; those after it are not
        simulated.
    """
    for b in range(len(devices)):
        step_ns[b] = simulate_core(arrays, work, devices[b], priority[b], limit_ns, memory)
        if work.counts[BEYOND_HORIZON] > 0:
            return b
    return -1


@compiled_inline
def _reset(arrays: ProblemArrays, work: Workspace, devices: Ints, memory: int) -> bool:
    """Reset to time 0; return False where an op may not run on its device or does not fit."""
    for k in range(work.counts[WAITING_PAIRS]):  # of a step that was aborted
        work.waiting[work.waiting_pairs[k]] = -1
    for k in range(COUNTS):
        work.counts[k] = 0
    for k in range(len(work.events)):
        work.events[k] = NO_EVENT
    for d in range(len(work.devices)):
        device = work.devices[d]
        device.running = -1
        device.previous = -1
        device.opened = -1
        device.ready = 0
        device.lone = -1
        device.work_left_ns = 0
        device.used_bytes = 0
        device.most_bytes = 0
        device.touched = False
    for q in range(len(work.queues)):
        queue = work.queues[q]
        queue.idle_ports = arrays.queues[q].ports
        queue.waiting = -1
        queue.busy = False
        queue.touched = False
    for number in range(len(devices)):
        i = index(number)
        d = index(devices[i])
        cost = arrays.cost_ns[i, arrays.column[d]]
        if cost == FORBIDDEN:
            return False
        op = arrays.ops[i]
        device = work.devices[d]
        device.work_left_ns += cost
        device.used_bytes += op.resident_bytes
        device.most_bytes += op.most_bytes
        inputs = arrays.ops[index(i + 1)].predecessor_start - op.predecessor_start
        work.ops[i].remaining = inputs
        work.ops[i].latest = 0
        if inputs == 0:
            work.start_ns[i] = 0
            work.cause[i] = -1
            make_ready(work, i, d)
    for d in range(len(work.devices)):
        device = work.devices[d]
        device.peak_bytes = device.used_bytes
        if memory == STOP_WHEN_FULL and device.used_bytes > arrays.memory_bytes[d]:
            return False
    return True


@compiled_inline
def _ranked(arrays: ProblemArrays, work: Workspace, step_ns: int) -> int:
    """Return the step, or ``OVERFULL_NS`` and more if the recorded peaks exceed memory."""
    missing = 0.0
    room = 0.0
    for d in range(len(arrays.memory_bytes)):
        missing += max(0, work.devices[d].peak_bytes - arrays.memory_bytes[d])
        room += arrays.memory_bytes[d]
    if missing == 0.0:
        return step_ns
    share = min(missing / max(room, 1.0), LARGEST_SHARE)
    return OVERFULL_NS + int(share * OVERFULL_NS)


@compiled_inline
def _takes_express(work: Workspace, memory: int) -> bool:
    """Return whether to try the express path: a failed attempt costs time.

    Not where peaks are recorded, and not for some steps after memory made it give up.
    """
    if memory in (IGNORE_MEMORY, RECORD_MEMORY):
        return memory == IGNORE_MEMORY
    work.rests[TO_REST] -= 1
    return bool(work.rests[TO_REST] < 0)


@compiled_inline
def _rest_if(work: Workspace, gave_up: bool) -> None:
    """Skip the express path for the next 1, 3, 7 and then 15 steps, as long as it gives up."""
    work.rests[RESTED] = min(2 * work.rests[RESTED] + 1, LONGEST_REST) if gave_up else 0
    work.rests[TO_REST] = work.rests[RESTED]
