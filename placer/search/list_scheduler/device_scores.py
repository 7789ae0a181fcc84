"""Scores of the devices for one op: the device features of the decoder, and the best device.

Times of all devices are rows of single precision, and every loop handles several devices at once.
"""

from __future__ import annotations

from typing import Final, TypeAlias, cast

import numpy as np

from envs.compiled import bits_of, compiled_inline, compiled_rows, from_bits, index, int64
from envs.problem import Ints, Singles
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.partial_schedule import (
    ZERO,
    PartialSchedule,
    bar_devices,
    gather_inputs,
)
from placer.search.list_scheduler.sight import DEVICE_SIGHT_COUNT, FARTHEST, Sight, add_sight
from placer.search.list_scheduler.soft_log import soft_log_of

_NO_BITS: Final = cast("int", np.int32(np.iinfo(np.int32).max))
_NO_KEY: Final = np.iinfo(np.int64).min
_LOW_BITS: Final = (1 << 32) - 1
_SIGN: Final = 31
_Leasts: TypeAlias = tuple[np.float32, np.float32, np.float32, np.float32]


@compiled_inline
def best_device(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    devices: Ints,
    u: Singles,
    sighted: Singles,
    v: int,
    heaviest_home: int,
) -> int:
    """Return the device with the highest score for op v, whose heaviest input is at a home."""
    siblings_ns = ZERO
    if u[8] != ZERO:
        siblings_ns = _siblings(o, v, devices, schedule.sibling)
    latest = gather_inputs(o, schedule, devices, v)
    bar_devices(o, schedule, v)
    _fill_times(o, schedule, schedule.begin, schedule.end, v)
    for k in range(DEVICE_SIGHT_COUNT):
        if sighted[k] != ZERO:
            add_sight(o, schedule, sight, sighted, v)
            break
    leasts = (
        _least(schedule, schedule.end),
        _least(schedule, schedule.begin),
        _least(schedule, schedule.free),
        _least(schedule, schedule.load),
    )
    inputs_ns = o.inputs_ns[v]
    shares = (
        u[4] / inputs_ns if inputs_ns > ZERO else ZERO,
        u[8] / siblings_ns if siblings_ns > ZERO else ZERO,
    )
    homes = (index(heaviest_home), index(latest))
    _fill_scores(o, schedule, schedule.score, u, sighted[1], leasts, shares, homes)
    return _choose(schedule)


@compiled_rows
def _fill_times(
    o: SchedulingArrays, schedule: PartialSchedule, begin: Singles, end: Singles, v: int
) -> None:
    """Fill when op v could start and finish on every device."""
    data = schedule.inputs[0]
    for d in range(len(begin)):
        start = max(schedule.free[d], data[d])
        begin[d] = start
        end[d] = start + o.cost[v, d]


@compiled_inline
def _least(schedule: PartialSchedule, times: Singles) -> np.float32:
    """Return the least of times (D,) on devices that are not barred."""
    least = _NO_BITS
    for d in range(len(times)):
        least = min(least, bits_of(times[d] + schedule.barred[d]))
    return from_bits(least)


@compiled_rows
def _fill_scores(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    score: Singles,
    u: Singles,
    of_sight: np.float32,
    leasts: _Leasts,
    shares: tuple[np.float32, np.float32],
    homes: tuple[int, int],
) -> None:
    """Fill the scores of all devices, minus infinity where they are barred.

    ``of_sight`` is the weight of the sight's logarithm, ``leasts`` are the least end, begin, free
    time and load, ``shares`` the weights of a ns of transfer time from inputs and siblings that are
    there, ``homes`` the devices of the heaviest and the latest input.
    """
    unit = np.float32(1.0 / o.scale)
    least_end, least_begin, least_free, least_load = leasts
    # Reading them in the loop, under a condition, would keep it from taking devices together.
    of_heaviest, of_latest, (of_inputs, of_siblings) = u[11], u[12], shares
    for d in range(len(score)):
        begin, end, free = schedule.begin[d], schedule.end[d], schedule.free[d]
        data, load = schedule.inputs[0, d], schedule.load[d]
        regret = (end - least_end) * unit
        queued = max(schedule.queue_free[index(o.out_queue[d])] - begin, ZERO)
        value = schedule.sight_value[d] + u[1] * min(regret, FARTHEST)
        value += of_sight * soft_log_of(schedule.sight_regret[d])
        value += u[0] * soft_log_of(regret)
        value += u[2] * soft_log_of((begin - least_begin) * unit)
        value += u[3] * soft_log_of((free - least_free) * unit)
        value += u[5] * soft_log_of(schedule.inputs[1, d] * unit)
        value += u[6] * soft_log_of((begin - free) * unit)
        value += u[7] * soft_log_of((begin - data) * unit)
        value += u[9] * soft_log_of((load - least_load) * unit)
        value += u[10] * soft_log_of(queued * unit)
        value += u[13] * soft_log_of(schedule.crowd[d])
        value += of_inputs * schedule.inputs[2, d]
        value += of_siblings * schedule.sibling[1 + d]
        value += of_heaviest if index(d) == homes[0] else ZERO
        value += of_latest if index(d) == homes[1] else ZERO
        score[d] = value - schedule.barred[d] + ZERO


@compiled_inline
def _choose(schedule: PartialSchedule) -> int:
    """Return the first device with the highest score of those that are not barred."""
    best = _NO_KEY
    for d in range(len(schedule.score)):
        bits = int64(bits_of(schedule.score[d]))
        ordered = bits ^ ((bits >> _SIGN) & ((1 << _SIGN) - 1))
        best = max(best, (ordered << 32) | (_LOW_BITS - d))
    chosen = _LOW_BITS - (best & _LOW_BITS)
    if schedule.barred[index(chosen)] > ZERO:  # scores are not numbers
        chosen = int64(0)
        while schedule.barred[index(chosen)] > ZERO:
            chosen += 1
    return chosen


@compiled_inline
def _siblings(o: SchedulingArrays, v: int, devices: Ints, sibling: Singles) -> np.float32:
    """Fill ``sibling`` with transfer times of the placed siblings of op v; return the sum.

    The first item of ``sibling`` gets those that are not placed.
    """
    sibling[:] = 0.0
    total = ZERO
    for k in range(o.sibling_start[v], o.sibling_start[v + 1]):
        home = index(devices[index(o.siblings[index(k)])] + 1)
        size_ns = o.sibling_ns[index(k)]
        sibling[home] += size_ns
        total += size_ns if home > 0 else ZERO
    return total
