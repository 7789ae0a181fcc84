"""State of a list schedule under construction, and its update op by op."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_inline, compiled_rows, index, lowest_set_bit
from envs.problem import Bools, Floats, Ints, Longs
from placer.search.list_scheduler.arrays import SchedulingArrays

LOG_COUNT: Final = 10
"""Device features of a decoder that have a soft logarithm; that of the sight comes first."""
WORD_BITS: Final = 6
"""Logarithm of the number of bits in a word of a bitmap."""
_LOW_BITS: Final = (1 << WORD_BITS) - 1


@by_pointer
class PartialSchedule(NamedTuple):
    """State of a decode; N ops, D devices. Create it with :func:`empty_schedule` and reuse it."""

    order: Longs  # (N,) ops by falling order score
    rank: Longs  # (N,) place in the order
    ready: Longs  # bitmap of ready ops by rank
    ready_words: Longs  # bitmap of the words of ``ready`` with any bit set
    waiting: Ints  # (N,) number of inputs not yet placed
    unread: Ints  # (N,) number of consumers not yet placed
    finish: Floats  # (N,) ns, of placed ops
    sent: Floats  # (N, D) arrival of a placed op's output or a copy, ns, -1 if it is not there
    pinned: Ints  # device of each co-location group, or -1
    queue_free: Floats  # by queue, ns; the last one, of transfers that never wait, is always free
    free: Floats  # from here on (D,); when the device is free, ns
    load: Floats
    resident: Floats  # bytes of parameters, gradients and optimizer state
    active: Floats  # bytes of outputs and copies that are still needed, if memory matters
    peak: Floats  # peak of active bytes so far
    crowd: Floats  # ready ops whose heaviest input is there
    inputs: Floats  # (3, D) of the current op: data, bring and have of :func:`gather_inputs`
    bring_bytes: Floats  # from here on (D,), of the current op
    reach: Bools  # whether links connect all inputs to it; stays true if they always do
    sibling: Floats  # (D + 1,) by device, after what is not placed
    tier: Longs
    begin: Floats  # when the op could start, ns
    end: Floats  # when the op could finish, ns
    least: Floats  # (4, D)
    value: Floats  # score of the device
    logs: NDArray[np.float32]  # (LOG_COUNT, D) features of the devices with a soft logarithm
    flat_logs: NDArray[np.float32]  # (LOG_COUNT * D,) the same memory
    log_row: Longs  # (LOG_COUNT,) where they are in logs: those with a weight first, in order
    log_weight: Floats  # (LOG_COUNT,)


def empty_schedule(problem: SchedulingArrays) -> PartialSchedule:
    """Allocate scratch space for decodes of a problem."""
    count, devices = problem.cost.shape
    words = (count >> WORD_BITS) + 1
    of_devices = ("free", "load", "resident", "active", "peak", "crowd")
    logs = np.zeros(LOG_COUNT * devices, np.float32)
    of_op = ("bring_bytes", "begin", "end", "value")
    return PartialSchedule(
        order=np.zeros(count, np.int64),
        rank=np.zeros(count, np.int64),
        ready=np.zeros(words, np.int64),
        ready_words=np.zeros((words >> WORD_BITS) + 1, np.int64),
        waiting=np.zeros(count, np.int32),
        unread=np.zeros(count, np.int32),
        finish=np.zeros(count),
        sent=np.zeros((count, devices)),
        pinned=np.zeros(len(problem.group_resident), np.int32),
        queue_free=np.zeros(problem.queue_count + 1),
        inputs=np.zeros((3, devices)),
        reach=np.ones(devices, np.bool_),
        sibling=np.zeros(devices + 1),
        tier=np.zeros(devices, np.int64),
        least=np.zeros((4, devices)),
        logs=logs.reshape(LOG_COUNT, devices),
        flat_logs=logs,
        log_row=np.zeros(LOG_COUNT, np.int64),
        log_weight=np.zeros(LOG_COUNT),
        **{name: np.zeros(devices) for name in (*of_devices, *of_op)},
    )


@compiled_inline
def reset(o: SchedulingArrays, schedule: PartialSchedule) -> None:
    """Reset the state; no op is ready."""
    for i in range(len(schedule.waiting)):
        schedule.waiting[i] = o.predecessor_start[i + 1] - o.predecessor_start[i]
        schedule.unread[i] = o.successor_start[i + 1] - o.successor_start[i]
    schedule.ready[:] = 0
    schedule.ready_words[:] = 0
    schedule.pinned[:] = -1
    schedule.queue_free[:] = 0.0
    for d in range(len(schedule.free)):
        schedule.free[d] = schedule.load[d] = schedule.crowd[d] = 0.0
        schedule.resident[d] = schedule.active[d] = schedule.peak[d] = 0.0


@compiled_inline
def gather_inputs(o: SchedulingArrays, schedule: PartialSchedule, devices: Ints, v: int) -> int:
    """Compute arrival and transfer times of op v's inputs for every device.

    Fills ``inputs``: data, when all inputs have arrived; bring, the transfer time of those that are
    not there; have, the mean transfer time of those that are. Returns the device of the input that
    finishes last.
    """
    inputs = schedule.inputs
    device_count = len(schedule.free)
    inputs[:] = 0.0
    if o.memory_matters or not o.all_connected:
        for d in range(device_count):
            schedule.bring_bytes[d] = 0.0
            schedule.reach[d] = True
    latest = -1
    latest_finish = -1.0
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        edge = index(e)
        p = index(o.predecessors[edge])
        home = index(devices[p])
        finish = schedule.finish[p]
        latest = home if finish > latest_finish else latest
        latest_finish = max(latest_finish, finish)
        _add_input(o, schedule, inputs[0], inputs[1], inputs[2], edge, p, home)
        if not o.all_connected:
            for d in range(device_count):
                schedule.reach[d] &= o.connected[home, d] or schedule.sent[p, d] >= 0.0
        if o.memory_matters:
            size = o.edge_bytes[edge]
            for d in range(device_count):
                schedule.bring_bytes[d] += 0.0 if schedule.sent[p, d] >= 0.0 else size
    return latest


@compiled_rows
def _add_input(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    data: Floats,
    bring: Floats,
    have: Floats,
    e: int,
    p: int,
    home: int,
) -> None:
    """Add the input along edge e, the output of op p on device ``home``."""
    finish, size, mean = schedule.finish[p], o.edge_bytes[e], o.edge_ns[e]
    for d in range(len(data)):
        at = schedule.sent[p, d]
        there = at >= 0.0
        transfer = o.latency[home, d] + size * o.ns_per_byte[home, d]
        arrival = max(finish, schedule.queue_free[index(o.queue[home, d])]) + transfer
        # Adding 0 keeps LLVM from a conditional store, which takes ten times as long.
        data[d] = max(data[d], at if there else arrival) + 0.0
        bring[d] += 0.0 if there else transfer
        have[d] += mean if there else 0.0


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
    if o.memory_matters:
        schedule.resident[d] += _new_resident_bytes(o, schedule, v)
    if o.group[v] >= 0:
        schedule.pinned[o.group[v]] = d
    begin = schedule.free[d]
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        edge = index(e)
        p = index(o.predecessors[edge])
        arrival = schedule.sent[p, d]
        if arrival < 0.0:
            home = index(devices[p])
            q = index(o.queue[home, d])
            arrival = max(schedule.finish[p], schedule.queue_free[q])
            arrival += o.latency[home, d] + o.edge_bytes[edge] * o.ns_per_byte[home, d]
            if q < o.queue_count:
                schedule.queue_free[q] = arrival
            if o.once_per_destination:
                schedule.sent[p, d] = arrival
                schedule.active[d] += o.output[p]
        begin = max(begin, arrival)
    schedule.finish[v] = begin + o.cost[v, d]
    for other in range(len(schedule.free)):
        schedule.sent[v, other] = -1.0
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
def push(schedule: PartialSchedule, rank: int) -> None:
    """Add a rank to the bitmap of ready ops."""
    word = index(rank >> WORD_BITS)
    schedule.ready[word] |= 1 << (rank & _LOW_BITS)
    schedule.ready_words[index(word >> WORD_BITS)] |= 1 << (word & _LOW_BITS)


@compiled_inline
def pop(schedule: PartialSchedule) -> int:
    """Remove and return the smallest rank in the bitmap, which must not be empty."""
    group = index(0)
    while schedule.ready_words[group] == 0:
        group = index(group + 1)
    words = schedule.ready_words[group]
    word = index((group << WORD_BITS) + lowest_set_bit(words))
    bits = schedule.ready[word]
    schedule.ready[word] = bits & (bits - 1)
    if schedule.ready[word] == 0:
        schedule.ready_words[group] = words & (words - 1)
    return int((word << WORD_BITS) + lowest_set_bit(bits))
