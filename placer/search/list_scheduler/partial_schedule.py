"""State of a list schedule under construction, and its update op by op."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from envs.compiled import by_pointer, compiled_inline, compiled_rows, index, lowest_set_bit
from envs.problem import Bools, Floats, Ints, Longs, Singles
from placer.search.list_scheduler.arrays import SchedulingArrays

ZERO: Final = np.float32(0.0)
INFINITY: Final = np.float32(np.inf)
DIGIT_BITS: Final = 8
DIGITS: Final = 4
"""Digits of the keys by which ops are sorted."""
WORD_BITS: Final = 6
"""Logarithm of the number of bits in a word of a bitmap."""
_LOW_BITS: Final = (1 << WORD_BITS) - 1


@by_pointer
class PartialSchedule(NamedTuple):
    """State of a decode of N ops on D devices, in rows of R as those of the arrays.

    Create it with :func:`empty_schedule` and reuse it.
    """

    order: Longs  # (N,) ops by falling order score
    order_scores: Singles  # (N,)
    sorted_keys: Ints  # (2, N) scratch space to sort them
    sorted_ops: Ints  # (2, N)
    digit_places: Longs  # (DIGITS, 1 << DIGIT_BITS)
    rank: Longs  # (N,) place in the order
    ready: Longs  # bitmap of ready ops by rank
    ready_words: Longs  # bitmap of the words of ``ready`` with any bit set
    waiting: Ints  # (N,) number of inputs not yet placed
    unread: Ints  # (N,) number of consumers not yet placed
    finish: Singles  # (N,) ns, of placed ops
    sent: Singles  # (N, R) arrival of a placed op's output or a copy, ns, -1 if it is not there
    pinned: Ints  # device of each co-location group, or -1
    queue_free: Singles  # by queue, ns; the last one, of transfers that never wait, is always free
    free: Singles  # from here on (R,); when the device is free, ns
    load: Singles
    resident: Floats  # bytes of parameters, gradients and optimizer state
    active: Floats  # bytes of outputs and copies that are still needed, if memory matters
    peak: Floats  # peak of active bytes so far
    crowd: Singles  # ready ops whose heaviest input is there
    inputs: Singles  # (3, R) of the current op: data, bring and have of :func:`gather_inputs`
    bring_bytes: Floats  # from here on (R,), of the current op
    reach: Bools  # whether links connect all inputs to it; stays true if they always do
    sibling: Singles  # (R + 1,) by device, after what is not placed
    tier: Ints  # of :func:`bar_devices`
    barred: Singles  # infinity where the op must not run, else 0
    begin: Singles  # when the op could start, ns
    end: Singles  # when the op could finish, ns
    score: Singles
    sight_value: Singles  # score of the device by what the sight adds; stays 0 without a sight
    sight_regret: Singles  # regret of the end of the step, in units; stays 0 without a sight


def empty_schedule(problem: SchedulingArrays) -> PartialSchedule:
    """Allocate scratch space for decodes of a problem."""
    count, devices = problem.cost.shape
    is_device = np.arange(devices) < problem.device_count
    words = (count >> WORD_BITS) + 1
    of_devices: dict[str, Any] = {
        **{name: np.zeros(devices) for name in ("resident", "active", "peak", "bring_bytes")},
        **{name: np.zeros(devices, np.float32) for name in ("free", "load", "crowd")},
        **{name: np.zeros(devices, np.float32) for name in ("begin", "end", "score")},
        **{name: np.zeros(devices, np.float32) for name in ("sight_value", "sight_regret")},
    }
    return PartialSchedule(
        order=np.zeros(count, np.int64),
        order_scores=np.zeros(count, np.float32),
        sorted_keys=np.zeros((2, count), np.int32),
        sorted_ops=np.zeros((2, count), np.int32),
        digit_places=np.zeros((DIGITS, 1 << DIGIT_BITS), np.int64),
        rank=np.zeros(count, np.int64),
        ready=np.zeros(words, np.int64),
        ready_words=np.zeros((words >> WORD_BITS) + 1, np.int64),
        waiting=np.zeros(count, np.int32),
        unread=np.zeros(count, np.int32),
        finish=np.zeros(count, np.float32),
        sent=np.zeros((count, devices), np.float32),
        pinned=np.zeros(len(problem.group_resident), np.int32),
        queue_free=np.zeros(problem.queue_count + 1, np.float32),
        inputs=np.zeros((3, devices), np.float32),
        reach=np.ones(devices, np.bool_),
        sibling=np.zeros(devices + 1, np.float32),
        tier=np.zeros(devices, np.int32),
        barred=np.where(is_device, ZERO, INFINITY),
        **of_devices,
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
        schedule.sight_value[d] = schedule.sight_regret[d] = 0.0


@compiled_inline
def gather_inputs(o: SchedulingArrays, schedule: PartialSchedule, devices: Ints, v: int) -> int:
    """Compute arrival and transfer times of op v's inputs for every device.

    Fills ``inputs``: data, when all inputs have arrived; bring, the transfer time of those that are
    not there; have, the mean transfer time of those that are. Returns the device of the input that
    finishes last.
    """
    inputs, device_count = schedule.inputs, o.device_count
    inputs[:] = 0.0
    if o.memory_matters or not o.all_connected:
        for d in range(device_count):
            schedule.bring_bytes[d] = 0.0
            schedule.reach[d] = True
    latest = -1
    latest_finish = np.float32(-1.0)
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
    data: Singles,
    bring: Singles,
    have: Singles,
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
        data[d] = max(data[d], at if there else arrival) + ZERO
        bring[d] += ZERO if there else transfer
        have[d] += mean if there else ZERO


@compiled_inline
def bar_devices(o: SchedulingArrays, schedule: PartialSchedule, v: int) -> None:
    """Bar the devices that are not of the best tier for op v.

    The tiers are: 3 good, 2 full, 1 unreachable, 0 forbidden.
    """
    if o.any_device:
        return
    best_tier = _rank_devices(o, schedule, v)
    for d in range(o.device_count):
        schedule.barred[d] = ZERO if schedule.tier[d] == best_tier else INFINITY


@compiled_inline
def _rank_devices(o: SchedulingArrays, schedule: PartialSchedule, v: int) -> int:
    """Fill the tier of every device for op v, and return the best one."""
    best_tier = 0
    if not o.memory_matters and o.group[v] < 0:
        for d in range(o.device_count):
            tier = (3 if schedule.reach[d] else 1) if o.allowed[v, d] else 0
            schedule.tier[d] = tier
            best_tier = max(best_tier, tier)
        return best_tier
    group = o.group[v]
    pinned = schedule.pinned[group] if group >= 0 else -1
    resident = _new_resident_bytes(o, schedule, v)
    for d in range(o.device_count):
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
    """Account for op v's output, and free inputs without further consumers, with all copies.

    An output that nothing reads stays to the end of the step, as in the simulator.
    """
    schedule.active[d] += o.output[v] + o.held[v]
    schedule.peak[d] = max(schedule.peak[d], schedule.active[d] + o.workspace[v])
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
