"""Scores of the devices for one op: the device features of the decoder, and the best device.

Times of all devices are rows, and every loop handles several devices at once.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_inline, compiled_rows, index
from envs.problem import Floats, Ints
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.partial_schedule import (
    LOG_COUNT,
    PartialSchedule,
    gather_inputs,
    rank_devices,
)
from placer.search.list_scheduler.sight import DEVICE_SIGHT_COUNT, Sight, add_sight

MOST_CONSUMERS: Final = 6
MOST_SIBLINGS: Final = 8
FARTHEST_FINISH: Final = 10.0
ONE: Final = np.float32(1.0)
LOGARITHMIC: Final = (0, 2, 3, 5, 6, 7, 9, 10, 13)
"""Device features with a soft logarithm, which follow that of the sight."""
Singles: TypeAlias = NDArray[np.float32]
LogRows: TypeAlias = tuple[
    Singles, Singles, Singles, Singles, Singles, Singles, Singles, Singles, Singles, Singles
]


@compiled_inline
def arrange_logs(schedule: PartialSchedule, u: Floats, of_sight: float) -> int:
    """Place the features with a soft logarithm: those with a weight first. Return their number."""
    used, unused = 0, LOG_COUNT - 1
    for k in range(LOG_COUNT):
        weight = of_sight if k == 0 else u[LOGARITHMIC[k - 1]]
        schedule.log_weight[k] = weight
        if weight != 0.0:
            schedule.log_row[k] = used
            used += 1
        else:
            schedule.log_row[k] = unused
            unused -= 1
    return used


@compiled_inline
def best_device(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    devices: Ints,
    u: Floats,
    sighted: Floats,
    log_count: int,
    v: int,
    heaviest_home: int,
) -> int:
    """Return the device with the highest score for op v, whose heaviest input is at a home."""
    logs, row = schedule.logs, schedule.log_row
    log_rows = (
        logs[index(row[0])],
        logs[index(row[1])],
        logs[index(row[2])],
        logs[index(row[3])],
        logs[index(row[4])],
        logs[index(row[5])],
        logs[index(row[6])],
        logs[index(row[7])],
        logs[index(row[8])],
        logs[index(row[9])],
    )
    siblings_ns = _siblings(o, v, devices, schedule.sibling) if u[8] != 0.0 else 0.0
    latest = gather_inputs(o, schedule, devices, v)
    best_tier = rank_devices(o, schedule, v)
    _begin(o, schedule, u[1], v, best_tier, log_count, log_rows)
    if (u[4] != 0.0) | (u[8] != 0.0) | (u[11] != 0.0) | (u[12] != 0.0):
        _add_places(o, schedule, u, v, siblings_ns, heaviest_home, latest)
    for k in range(DEVICE_SIGHT_COUNT):
        if sighted[k] != 0.0:
            add_sight(o, schedule, sight, sighted, v, best_tier)
            break
    if log_count > 0:
        _take_logs(schedule.flat_logs, log_count * len(schedule.value))
        _add_logs(schedule, schedule.value, log_rows)
    return _choose(schedule, best_tier)


@compiled_inline
def _begin(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    weight: float,
    v: int,
    best_tier: int,
    log_count: int,
    log_rows: LogRows,
) -> None:
    """Start the values of op v's devices with feature 1, and fill the features for logarithms."""
    least = schedule.least
    _fill_times(o, schedule, schedule.begin, schedule.end, least[0], v, best_tier)
    least_end = _least(least[0])
    _start_values(o, schedule, schedule.value, weight, least_end)
    if log_count > 0:
        _fill_least(schedule, least[1], least[2], least[3], best_tier)
        leasts = (least_end, _least(least[1]), _least(least[2]), _least(least[3]))
        _fill_logs(o, schedule, leasts, log_rows)


@compiled_rows
def _fill_times(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    begin: Floats,
    end: Floats,
    ends: Floats,
    v: int,
    best_tier: int,
) -> None:
    """Fill when op v could start and finish on every device, and ``ends`` of the best tier."""
    data = schedule.inputs[0]
    for d in range(len(begin)):
        start = max(schedule.free[d], data[d])
        begin[d] = start
        end[d] = start + o.cost[v, d]
        ends[d] = end[d] if schedule.tier[d] == best_tier else np.inf


@compiled_rows
def _fill_least(
    schedule: PartialSchedule, starts: Floats, frees: Floats, loads: Floats, best_tier: int
) -> None:
    """Fill starts, free times and loads of the devices of the best tier, infinity of others."""
    for d in range(len(starts)):
        best = schedule.tier[d] == best_tier
        starts[d] = schedule.begin[d] if best else np.inf
        frees[d] = schedule.free[d] if best else np.inf
        loads[d] = schedule.load[d] if best else np.inf


@compiled_inline
def _least(row: Floats) -> float:
    least = np.inf
    for d in range(len(row)):
        least = min(least, row[d])
    return least


@compiled_rows
def _start_values(
    o: SchedulingArrays, schedule: PartialSchedule, value: Floats, weight: float, least: float
) -> None:
    unit = 1.0 / o.scale
    for d in range(len(value)):
        value[d] = weight * min((schedule.end[d] - least) * unit, FARTHEST_FINISH)


@compiled_rows
def _fill_logs(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    least: tuple[float, float, float, float],
    log_rows: LogRows,
) -> None:
    """Fill the features before the logarithm is taken; that of the sight with 0."""
    unit = 1.0 / o.scale
    least_end, least_start, least_free, least_load = least
    of_sight, end, start, free, bring, wait, idle, load, backlog, crowd = log_rows
    for d in range(len(crowd)):
        begin, free_ns, data = schedule.begin[d], schedule.free[d], schedule.inputs[0, d]
        of_sight[d] = 0.0
        end[d] = (schedule.end[d] - least_end) * unit
        start[d] = (begin - least_start) * unit
        free[d] = (free_ns - least_free) * unit
        bring[d] = schedule.inputs[1, d] * unit
        wait[d] = (begin - free_ns) * unit
        idle[d] = (begin - data) * unit
        load[d] = (schedule.load[d] - least_load) * unit
        queue_free = schedule.queue_free[index(o.out_queue[d])]
        backlog[d] = max(queue_free - begin, 0.0) * unit
        crowd[d] = schedule.crowd[d]


@compiled_inline
def _add_places(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    u: Floats,
    v: int,
    siblings_ns: float,
    heaviest_home: int,
    latest: int,
) -> None:
    """Add the features of where inputs, and the consumers' other inputs, are."""
    inputs_ns = 0.0
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        inputs_ns += o.edge_ns[index(e)]
    of_inputs, of_siblings = u[4], u[8]
    if inputs_ns <= 0.0:
        of_inputs, inputs_ns = 0.0, 1.0
    if siblings_ns <= 0.0:
        of_siblings, siblings_ns = 0.0, 1.0
    _add_shares(
        schedule,
        schedule.value,
        (of_inputs, of_siblings, u[11], u[12]),
        (inputs_ns, siblings_ns),
        (heaviest_home, latest),
    )


@compiled_rows
def _add_shares(
    schedule: PartialSchedule,
    value: Floats,
    weights: tuple[float, float, float, float],
    totals: tuple[float, float],
    homes: tuple[int, int],
) -> None:
    """Add shares of inputs and of siblings, and the devices of the heaviest and latest input."""
    of_inputs, of_siblings, of_heaviest, of_latest = weights
    heaviest, latest = homes
    for d in range(len(value)):
        score = value[d] + of_inputs * schedule.inputs[2, d] / totals[0]
        score += of_siblings * schedule.sibling[1 + d] / totals[1]
        score += of_heaviest if d == heaviest else 0.0
        score += of_latest if d == latest else 0.0
        value[d] = score


@compiled_inline
def _take_logs(logs: Singles, count: int) -> None:
    """Replace numbers by half their soft logarithm, several at once."""
    for k in range(count):
        root = np.sqrt(np.sqrt(ONE + logs[k]))
        logs[k] = root - ONE / root


@compiled_rows
def _add_logs(schedule: PartialSchedule, value: Floats, log_rows: LogRows) -> None:
    """Add the weighted soft logarithms to the values of the devices."""
    a, b, c, e, f, g, h, i, j, k = log_rows
    weight = schedule.log_weight
    for d in range(len(value)):
        total = weight[0] * a[d]
        total += weight[1] * b[d]
        total += weight[2] * c[d]
        total += weight[3] * e[d]
        total += weight[4] * f[d]
        total += weight[5] * g[d]
        total += weight[6] * h[d]
        total += weight[7] * i[d]
        total += weight[8] * j[d]
        total += weight[9] * k[d]
        value[d] += 2.0 * total


@compiled_inline
def _choose(schedule: PartialSchedule, best_tier: int) -> int:
    """Return the first device of the best tier with the highest value."""
    value, tier = schedule.value, schedule.tier
    device_count = len(value)
    best = -np.inf
    for d in range(device_count):
        here = value[d]
        best = max(best, here if tier[d] == best_tier else -np.inf)
    chosen = -1
    for k in range(device_count):
        d = index(device_count - 1 - k)
        chosen = d if (value[d] == best) & (tier[d] == best_tier) else chosen
    if chosen < 0:  # choose a device even if all values are NaN
        chosen = 0
        while tier[index(chosen)] != best_tier:
            chosen += 1
    return chosen


@compiled_inline
def _siblings(o: SchedulingArrays, v: int, devices: Ints, sibling: Floats) -> float:
    """Fill ``sibling`` with transfer times of the consumers' other placed inputs; return the sum.

    Only the first :data:`MOST_SIBLINGS` inputs of the first :data:`MOST_CONSUMERS` consumers count.
    The first item of ``sibling`` gets the inputs that are not placed.
    """
    sibling[:] = 0.0
    total = 0.0
    first = o.successor_start[v]
    for s in range(first, min(o.successor_start[v + 1], first + MOST_CONSUMERS)):
        w = index(o.successors[index(s)])
        begin = o.predecessor_start[w]
        for e in range(begin, min(o.predecessor_start[index(w + 1)], begin + MOST_SIBLINGS)):
            edge = index(e)
            home = index(devices[index(o.predecessors[edge])] + 1)
            size_ns = o.edge_ns[edge]
            sibling[home] += size_ns
            total += size_ns if home > 0 else 0.0
    return total
