"""Radix sort of the ops by their order scores, faster than numpy's stable sort."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from envs.compiled import by_pointer, compiled_inline, index
from envs.problem import Floats, Longs

DIGIT_BITS: Final = 8
DIGITS: Final = 8
_LOW_BITS: Final = (1 << DIGIT_BITS) - 1
_LARGEST: Final = np.iinfo(np.int64).max
_SMALLEST: Final = np.iinfo(np.int64).min


@by_pointer
class SortSpace(NamedTuple):
    """Scratch space to sort N ops."""

    keys: Longs  # (2, N)
    ops: Longs  # (2, N)
    places: Longs  # (DIGITS, 1 << DIGIT_BITS)


def sort_space(count: int) -> SortSpace:
    """Allocate scratch space to sort ``count`` ops."""
    return SortSpace(
        keys=np.zeros((2, count), np.int64),
        ops=np.zeros((2, count), np.int64),
        places=np.zeros((DIGITS, 1 << DIGIT_BITS), np.int64),
    )


def descending_keys(scores: Floats) -> Longs:
    """Return keys whose order as unsigned numbers is that of falling scores, which are finite."""
    bits = (0.0 - scores).view(np.int64)  # never -0
    return bits ^ ((bits >> 63) & _LARGEST) ^ _SMALLEST


@compiled_inline
def sort_ops(space: SortSpace, keys: Longs, order: Longs) -> None:
    """Fill ``order`` with the ops by rising key; of equal keys the lowest op comes first."""
    count = len(keys)
    places = space.places
    places[:] = 0
    for v in range(count):
        space.keys[0, v] = keys[v]
        space.ops[0, v] = v
        for k in range(DIGITS):
            places[k, index((keys[v] >> (DIGIT_BITS * k)) & _LOW_BITS)] += 1
    side = 0
    for k in range(DIGITS):
        shift = DIGIT_BITS * k
        if places[k, index((keys[0] >> shift) & _LOW_BITS)] == count:
            continue  # the digit is that of all keys
        _move(space, k, index(side), index(1 - side))
        side = 1 - side
    for v in range(count):
        order[v] = space.ops[index(side), v]


@compiled_inline
def _move(space: SortSpace, digit: int, source: int, target: int) -> None:
    """Sort the ops by one digit, from one side of the scratch space to the other."""
    places = space.places
    place = 0
    for k in range(1 << DIGIT_BITS):
        here = places[digit, k]
        places[digit, k] = place
        place += here
    for i in range(space.keys.shape[1]):
        key = space.keys[source, i]
        of_digit = index((key >> (DIGIT_BITS * digit)) & _LOW_BITS)
        to = index(places[digit, of_digit])
        places[digit, of_digit] += 1
        space.keys[target, to] = key
        space.ops[target, to] = space.ops[source, i]
