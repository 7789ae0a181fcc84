"""Earliest Task First: place the (op, device) pair that can start soonest.

Hwang, Chow, Anger, Lee: Scheduling precedence graphs in systems with interprocessor communication
times (1989). Ties go to the highest upward rank, then to the lowest device index.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline, int64
from envs.problem import Bools, Floats, Ints, Longs, Singles
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.partial_schedule import (
    PartialSchedule,
    empty_schedule,
    pop,
    push,
    reset,
)

WINDOW: Final = 128
"""Number of ready ops considered in each round, those with the highest upward ranks; this makes N *
128 * D steps."""


def etf(problem: SchedulingArrays) -> tuple[Ints, Floats]:
    """Return devices (N,) and priorities (N,) of Earliest Task First.

    Memory in use counts parameters, gradients, optimizer state and held bytes of the placed ops,
    without their outputs. A device without room for an op's own bytes and output is excluded if
    another has room.
    """
    count, device_count = len(problem.cost), problem.device_count
    devices, priority = np.full(count, -1, np.int32), np.zeros(count)
    schedule = empty_schedule(problem)
    order = np.argsort(-problem.bottom_level, kind="stable")
    schedule.rank[order] = np.arange(count)
    ready = _Ready(
        first=np.zeros(WINDOW, np.int64),
        data=np.zeros((count, device_count), np.float32),
        reach=np.ones((count, device_count), np.bool_),
    )
    _etf(problem, schedule, ready, order, devices, priority)
    return devices, priority


def memory_etf(problem: SchedulingArrays) -> tuple[Ints, Floats]:
    """Return devices (N,) and priorities (N,) of m-ETF, where outputs stay for the whole step.

    This is how Baechi counts a training step (Jeon et al., arXiv 2301.08695). An op's workspace
    needs room only while it runs.
    """
    kept = problem._replace(
        resident=problem.resident + problem.output, output=problem.workspace.copy()
    )
    return etf(kept)


@by_pointer
class _Ready(NamedTuple):
    """The first ready ops by upward rank, and the inputs of all ready ops, for every device."""

    first: Longs  # (WINDOW,) ranks, ascending
    data: Singles  # (N, D) arrival of all inputs, ns
    reach: Bools  # (N, D) whether links connect all inputs to it


@compiled_borrowing
def _etf(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    ready: _Ready,
    order: Longs,
    devices: Ints,
    priority: Floats,
) -> None:
    """Fill ``devices`` (N,), initially -1, and ``priority`` (N,); ``order`` is by upward rank.

    The bitmap of the schedule holds the ranks of the ready ops beyond the window.
    """
    count, device_count = len(o.cost), o.device_count
    waiting, finish, free = schedule.waiting, schedule.finish, schedule.free
    pinned, queue_free, sent = schedule.pinned, schedule.queue_free, schedule.sent
    rank, used = schedule.rank, schedule.resident
    first, data, reach = ready.first, ready.data, ready.reach
    reset(o, schedule)
    size, beyond = 0, 0
    for r in range(count):
        if waiting[order[r]] == 0:
            if size < WINDOW:
                first[size] = r
                size += 1
            else:
                push(schedule, r)
                beyond += 1

    for position in range(count):
        best = np.inf
        best_tier = 0
        at = -1
        device = int64(-1)
        for k in range(size):
            v = order[first[k]]
            group = o.group[v]
            for d in range(device_count):
                if not o.allowed[v, d] or (group >= 0 and pinned[group] not in (-1, d)):
                    continue
                tier = 2 if reach[v, d] else 1
                if o.memory_matters:
                    tier *= 2
                    tier += used[d] + o.resident[v] + o.held[v] + o.output[v] <= o.memory[d]
                begin = max(free[d], data[v, d])
                if tier > best_tier or (tier == best_tier and begin < best):
                    best, best_tier, at, device = begin, tier, k, d
        v = order[first[at]]
        size -= 1
        for k in range(at, size):
            first[k] = first[k + 1]
        if beyond > 0:
            first[size] = pop(schedule)
            size += 1
            beyond -= 1

        devices[v] = device
        priority[v] = count - position
        used[device] += o.resident[v] + o.held[v]
        if o.group[v] >= 0:
            pinned[o.group[v]] = device
        begin = free[device]
        for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
            p = o.predecessors[e]
            arrival = _arrival(o, e, devices[p], device, finish[p], sent, queue_free)
            if sent[p, device] < 0.0:
                q = o.queue[devices[p], device]
                if q < o.queue_count:
                    queue_free[q] = arrival
                if o.once_per_destination:
                    sent[p, device] = arrival
            begin = max(begin, arrival)
        finish[v] = begin + o.cost[v, device]
        sent[v, :] = -1.0
        sent[v, device] = finish[v]
        free[device] = finish[v]

        for s in range(o.successor_start[v], o.successor_start[v + 1]):
            w = o.successors[s]
            waiting[w] -= 1
            if waiting[w] > 0:
                continue
            r = int64(rank[w])
            if size == WINDOW and r < first[WINDOW - 1]:
                push(schedule, first[WINDOW - 1])
                beyond += 1
                size -= 1
            if size == WINDOW:
                push(schedule, r)
                beyond += 1
            else:
                hole = size
                while hole > 0 and first[hole - 1] > r:
                    first[hole] = first[hole - 1]
                    hole -= 1
                first[hole] = r
                size += 1
            for e in range(o.predecessor_start[w], o.predecessor_start[w + 1]):
                p = o.predecessors[e]
                for d in range(device_count):
                    arrival = _arrival(o, e, devices[p], d, finish[p], sent, queue_free)
                    reach[w, d] &= o.connected[devices[p], d]
                    data[w, d] = max(data[w, d], arrival)


@compiled_inline
def _arrival(
    o: SchedulingArrays,
    e: int,
    home: int,
    device: int,
    finish: float,
    sent: Singles,
    queue_free: Singles,
) -> float:
    """Return when edge ``e``, produced at ``finish`` on ``home``, arrives on ``device``."""
    copied = sent[o.predecessors[e], device]
    if copied >= 0.0:
        return float(copied)
    finish = max(finish, queue_free[o.queue[home, device]])
    return float(finish + o.latency[home, device] + o.edge_bytes[e] * o.ns_per_byte[home, device])
