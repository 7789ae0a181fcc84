"""Radix sort of the ops by their order scores, faster than numpy's stable sort."""

from __future__ import annotations

from typing import Final

import numpy as np

from envs.compiled import bits_of, compiled_inline, compiled_rows, index
from envs.problem import Ints
from placer.search.list_scheduler.partial_schedule import DIGIT_BITS, DIGITS, ZERO, PartialSchedule

_LOW_BITS: Final = (1 << DIGIT_BITS) - 1
_LARGEST: Final = np.iinfo(np.int32).max
_SMALLEST: Final = np.iinfo(np.int32).min
_SIGN: Final = 31


@compiled_inline
def sort_ops(schedule: PartialSchedule) -> None:
    """Fill the order of the ops by falling score; of equal ones the lowest op comes first."""
    _fill_keys(schedule, schedule.sorted_keys[0])
    keys, ops, places = schedule.sorted_keys, schedule.sorted_ops, schedule.digit_places
    count = len(schedule.order)
    places[:] = 0
    for v in range(count):
        ops[0, v] = v
        for k in range(DIGITS):
            places[k, index((keys[0, v] >> (DIGIT_BITS * k)) & _LOW_BITS)] += 1
    side = 0
    for k in range(DIGITS):
        if places[k, index((keys[side, 0] >> (DIGIT_BITS * k)) & _LOW_BITS)] == count:
            continue  # the digit is that of all keys
        _move(schedule, k, index(side), index(1 - side))
        side = 1 - side
    for v in range(count):
        schedule.order[v] = ops[index(side), v]


@compiled_rows
def _fill_keys(schedule: PartialSchedule, keys: Ints) -> None:
    """Fill the keys, whose order as unsigned numbers is that of falling scores."""
    for v in range(len(keys)):
        bits = bits_of(schedule.order_scores[v] + ZERO)  # never -0
        keys[v] = ~(bits ^ ((bits >> _SIGN) & _LARGEST) ^ _SMALLEST)


@compiled_inline
def _move(schedule: PartialSchedule, digit: int, source: int, target: int) -> None:
    """Sort the ops by one digit, from one side of the scratch space to the other."""
    keys, ops, places = schedule.sorted_keys, schedule.sorted_ops, schedule.digit_places
    place = 0
    for k in range(1 << DIGIT_BITS):
        here = places[digit, k]
        places[digit, k] = place
        place += here
    for i in range(keys.shape[1]):
        key = keys[source, i]
        of_digit = index((key >> (DIGIT_BITS * digit)) & _LOW_BITS)
        to = index(places[digit, of_digit])
        places[digit, of_digit] += 1
        keys[target, to] = key
        ops[target, to] = ops[source, i]
