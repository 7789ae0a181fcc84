"""State of a list schedule under construction, and its update op by op."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_inline, int64
from envs.problem import Bools, Floats, Ints, Longs
from placer.search.list_scheduler.arrays import SchedulingArrays

LOG_COUNT: Final = 10
"""Device features of a decoder that have a soft logarithm."""


@by_pointer
class PartialSchedule(NamedTuple):
    """State of a decode; N ops, D devices. Create it with :func:`empty_schedule` and reuse it."""

    rank: Longs  # (N,) of the order score
    heap: Longs  # (N,) ranks of ready ops
    waiting: Ints  # (N,) number of inputs not yet placed
    unread: Ints  # (N,) number of consumers not yet placed
    heaviest_home: Ints  # (N,) device of a ready op's heaviest input, or -1
    finish: Floats  # (N,) ns
    sent: Floats  # (N, D) arrival of an output or a copy of it, ns, -1 if it is not there
    pinned: Ints  # device of each co-location group, or -1
    queue_free: Floats  # by queue, ns; the last one, of transfers that never wait, is always free
    free: Floats  # from here on (D,); when the device is free, ns
    load: Floats
    resident: Floats  # bytes of parameters, gradients and optimizer state
    active: Floats  # bytes of outputs and copies that are still needed
    peak: Floats  # peak of active bytes so far
    crowd: Floats  # ready ops whose heaviest input is there
    data: Floats  # from here on of the current op: arrival of all inputs, ns
    bring: Floats  # transfer time of the inputs that are not there, ns
    bring_bytes: Floats
    have: Floats  # mean transfer time of the inputs already there, ns
    reach: Bools
    sibling: Floats
    tier: Longs
    begin: Floats  # when the op could start, ns
    value: Floats  # score of the device
    logs: NDArray[np.float32]  # (D * LOG_COUNT,) features of the devices with a soft logarithm


def empty_schedule(problem: SchedulingArrays) -> PartialSchedule:
    """Allocate scratch space for decodes of a problem."""
    count, devices = problem.cost.shape
    of_devices = ("free", "load", "resident", "active", "peak", "crowd")
    of_op = ("data", "bring", "bring_bytes", "have", "sibling", "begin", "value")
    return PartialSchedule(
        rank=np.zeros(count, np.int64),
        heap=np.zeros(count, np.int64),
        waiting=np.zeros(count, np.int32),
        unread=np.zeros(count, np.int32),
        heaviest_home=np.zeros(count, np.int32),
        finish=np.zeros(count),
        sent=np.zeros((count, devices)),
        pinned=np.zeros(len(problem.group_resident), np.int32),
        queue_free=np.zeros(problem.queue_count + 1),
        reach=np.zeros(devices, np.bool_),
        tier=np.zeros(devices, np.int64),
        logs=np.zeros(devices * LOG_COUNT, np.float32),
        **{name: np.zeros(devices) for name in (*of_devices, *of_op)},
    )


@compiled_inline
def reset(o: SchedulingArrays, schedule: PartialSchedule) -> int:
    """Reset the state, put the sources on the heap, and return the size of the heap."""
    size = int64(0)
    for i in range(len(schedule.waiting)):
        schedule.waiting[i] = o.predecessor_start[i + 1] - o.predecessor_start[i]
        schedule.unread[i] = o.successor_start[i + 1] - o.successor_start[i]
        if schedule.waiting[i] == 0:
            size = push(schedule.heap, size, schedule.rank[i])
    schedule.heaviest_home[:] = -1
    schedule.sent[:] = -1.0
    schedule.pinned[:] = -1
    schedule.queue_free[:] = 0.0
    schedule.free[:] = 0.0
    schedule.load[:] = 0.0
    schedule.resident[:] = 0.0
    schedule.active[:] = 0.0
    schedule.peak[:] = 0.0
    schedule.crowd[:] = 0.0
    return size


@compiled_inline
def gather_inputs(o: SchedulingArrays, schedule: PartialSchedule, devices: Ints, v: int) -> int:
    """Compute arrival and transfer times of op v's inputs for every device.

    Returns the device of the input that finishes last.
    """
    device_count = len(schedule.free)
    data, have, bring, sent = schedule.data, schedule.have, schedule.bring, schedule.sent
    queue_free = schedule.queue_free
    for d in range(device_count):
        data[d] = 0.0
        bring[d] = 0.0
        have[d] = 0.0
        schedule.bring_bytes[d] = 0.0
        schedule.reach[d] = True
    latest = -1
    latest_finish = -1.0
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        p = o.predecessors[e]
        home = devices[p]
        finish, size, mean = schedule.finish[p], o.edge_bytes[e], o.edge_ns[e]
        if finish > latest_finish:
            latest_finish = finish
            latest = home
        for d in range(device_count):  # without branches, which would be mispredicted
            at = sent[p, d]
            there = at >= 0.0
            transfer = o.latency[home, d] + size * o.ns_per_byte[home, d]
            arrival = max(finish, queue_free[o.queue[home, d]]) + transfer
            data[d] = max(data[d], at if there else arrival)
            have[d] += mean if there else 0.0
            bring[d] += 0.0 if there else transfer
        if not o.all_connected:
            for d in range(device_count):
                schedule.reach[d] &= o.connected[home, d] or sent[p, d] >= 0.0
        if o.memory_matters:
            for d in range(device_count):
                schedule.bring_bytes[d] += 0.0 if sent[p, d] >= 0.0 else size
    return latest


@compiled_inline
def rank_devices(o: SchedulingArrays, schedule: PartialSchedule, v: int) -> int:
    """Fill the tier of every device for op v: 3 good, 2 full, 1 unreachable, 0 forbidden.

    Returns the best tier.
    """
    best_tier = 0
    if not o.memory_matters and o.group[v] < 0:
        for d in range(len(schedule.free)):
            tier = (3 if schedule.reach[d] else 1) if o.allowed[v, d] else 0
            schedule.tier[d] = tier
            best_tier = max(best_tier, tier)
        return best_tier
    group = o.group[v]
    pinned = schedule.pinned[group] if group >= 0 else -1
    resident = _new_resident_bytes(o, schedule, v)
    for d in range(len(schedule.free)):
        tier = 0
        if o.allowed[v, d] and (pinned < 0 or pinned == d):
            tier = 3 if schedule.reach[d] else 1
            if o.memory_matters:
                output = o.output[v] + o.held[v] + o.workspace[v]
                active = schedule.active[d] + output + schedule.bring_bytes[d]
                if schedule.resident[d] + resident + max(schedule.peak[d], active) > o.memory[d]:
                    tier = max(tier - 1, 1)
        schedule.tier[d] = tier
        best_tier = max(best_tier, tier)
    return best_tier


@compiled_inline
def commit(o: SchedulingArrays, schedule: PartialSchedule, devices: Ints, v: int, d: int) -> None:
    """Send the inputs that device d lacks, and run op v there."""
    schedule.resident[d] += _new_resident_bytes(o, schedule, v)
    if o.group[v] >= 0:
        schedule.pinned[o.group[v]] = d
    begin = schedule.free[d]
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        p = o.predecessors[e]
        arrival = schedule.sent[p, d]
        if arrival < 0.0:
            home = devices[p]
            q = o.queue[home, d]
            arrival = max(schedule.finish[p], schedule.queue_free[q])
            arrival += o.latency[home, d] + o.edge_bytes[e] * o.ns_per_byte[home, d]
            if q < o.queue_count:
                schedule.queue_free[q] = arrival
            if o.once_per_destination:
                schedule.sent[p, d] = arrival
                schedule.active[d] += o.output[p]
        begin = max(begin, arrival)
    schedule.finish[v] = begin + o.cost[v, d]
    schedule.sent[v, d] = schedule.finish[v]
    schedule.free[d] = schedule.finish[v]
    schedule.load[d] += o.cost[v, d]


@compiled_inline
def release(o: SchedulingArrays, schedule: PartialSchedule, v: int, d: int) -> None:
    """Account for op v's output, and free inputs without further consumers, with all copies."""
    schedule.active[d] += o.output[v] + o.held[v]
    schedule.peak[d] = max(schedule.peak[d], schedule.active[d] + o.workspace[v])
    if schedule.unread[v] == 0:
        schedule.active[d] -= o.output[v]
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        p = o.predecessors[e]
        schedule.unread[p] -= 1
        if schedule.unread[p] == 0:
            for other in range(len(schedule.free)):
                if schedule.sent[p, other] >= 0.0:
                    schedule.active[other] -= o.output[p]


@compiled_inline
def _new_resident_bytes(o: SchedulingArrays, schedule: PartialSchedule, v: int) -> float:
    """Return the resident bytes that op v adds; the first op of a group adds those of the group."""
    group = o.group[v]
    if group < 0:
        return float(o.resident[v])
    return float(o.group_resident[group]) if schedule.pinned[group] < 0 else 0.0


@compiled_inline
def find_heaviest(o: SchedulingArrays, schedule: PartialSchedule, devices: Ints, w: int) -> None:
    """Store the device of the heaviest input of op w, which has become ready."""
    heavy = -1.0
    for e in range(o.predecessor_start[w], o.predecessor_start[w + 1]):
        if o.edge_ns[e] > heavy:
            heavy = o.edge_ns[e]
            schedule.heaviest_home[w] = devices[o.predecessors[e]]
    schedule.crowd[schedule.heaviest_home[w]] += 1.0


@compiled_inline
def push(heap: Longs, size: int, rank: int) -> int:
    """Add a rank to a binary heap of ``size``; return the new size."""
    hole = size
    while hole > 0 and heap[(hole - 1) >> 1] > rank:
        heap[hole] = heap[(hole - 1) >> 1]
        hole = (hole - 1) >> 1
    heap[hole] = rank
    return size + 1


@compiled_inline
def pop(heap: Longs, size: int) -> int:
    """Remove and return the smallest rank; the heap then has ``size - 1``."""
    top = heap[0]
    last = heap[size - 1]
    size -= 1
    hole = 0
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = last
    return int(top)
