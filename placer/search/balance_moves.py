"""Moves of the max-load search.

A move changes the device of an op (with its co-location group), of a connected cluster, of a run in
a topological order, or of two ops that swap, mostly starting from an op on the busiest device.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_inline, int64
from envs.compiled_tables import by_pointer
from envs.max_load import LoadArrays
from placer.search.randomness import below, exponential, uniform

ON_BUSIEST: Final = 0.7
TRIES: Final = 8
SWAPS: Final = 0.15
RUNS: Final = 0.05
CLUSTERS: Final = 0.35
MEAN_CLUSTER: Final = 5.0
LARGE: Final = 0.2
LOOSE: Final = 0.5
TO_NEIGHBOUR: Final = 0.7

BEST: Final = 0
MOVED: Final = 1
COUNTED: Final = 2
BUSIEST: Final = 3
COUNTERS: Final = 4


@by_pointer
class Balance(NamedTuple):
    """State and scratch space of a run; N ops, D devices, C co-location groups."""

    devices: NDArray[np.int32]  # (N,)
    best_devices: NDArray[np.int32]  # (N,)
    energy: NDArray[np.float64]  # (1,)
    order: NDArray[np.int32]  # (N,) ops, sources first
    position: NDArray[np.int32]  # (N,) position of each op in the order
    group: NDArray[np.int32]  # (N,) -1 for none
    group_start: NDArray[np.int32]  # (C + 1,)
    members: NDArray[np.int32]
    predecessor_start: NDArray[np.int32]
    predecessors: NDArray[np.int32]
    moved: NDArray[np.int32]  # the first counters[MOVED] entries are the moved ops
    moved_from: NDArray[np.int32]
    counted: NDArray[np.int32]  # the first counters[COUNTED] entries are to be recounted
    is_counted: NDArray[np.bool_]  # (N,)
    counters: NDArray[np.int64]
    random: NDArray[np.uint64]  # (1,)


@compiled_inline
def propose(arrays: LoadArrays, state: Balance, device_count: int) -> None:
    """Apply a random move to ``devices``, and record the moved ops and their previous devices."""
    random = state.random
    op = below(random, len(state.devices))
    if uniform(random) < ON_BUSIEST:
        for _ in range(TRIES):
            if state.devices[op] == state.counters[BUSIEST]:
                break
            op = below(random, len(state.devices))
    home = int64(state.devices[op])
    kind = uniform(random)
    if kind < SWAPS:
        other = below(random, len(state.devices))
        there = int64(state.devices[other])
        apart = state.group[op] < 0 or state.group[op] != state.group[other]
        if there != home and apart and arrays.allowed[op, there] and arrays.allowed[other, home]:
            _move(state, op, there)
            _move(state, other, home)
        return
    if kind < SWAPS + RUNS:
        _move_run(arrays, state, op, device_count)
        return
    target = below(random, device_count)
    if uniform(random) < TO_NEIGHBOUR and _degree(arrays, state, op) > 0:
        k = below(random, _degree(arrays, state, op))
        target = int64(state.devices[_neighbour(arrays, state, op, k)])
    if target == home:
        target = _another(random, home, device_count)
    if not arrays.allowed[op, target]:
        return
    _move(state, op, target)
    if kind < SWAPS + RUNS + CLUSTERS:
        _move_cluster(arrays, state, home, target)


@compiled_inline
def _move_cluster(arrays: LoadArrays, state: Balance, home: int, target: int) -> None:
    """Move neighbours on ``home`` along with the moved ops, breadth first."""
    random = state.random
    size = 2 + int(min(exponential(random, MEAN_CLUSTER), len(state.devices)))
    if uniform(random) < LARGE:
        size = _any_size(state)
    spreading = 1.0 - LOOSE * uniform(random)
    leader = 0
    while leader < state.counters[MOVED] and state.counters[MOVED] < size:
        op = int64(state.moved[leader])
        leader += 1
        for k in range(_degree(arrays, state, op)):
            other = _neighbour(arrays, state, op, k)
            if (
                state.devices[other] == home
                and arrays.allowed[other, target]
                and uniform(random) < spreading
            ):
                _move(state, other, target)
                if state.counters[MOVED] >= size:
                    return


@compiled_inline
def _move_run(arrays: LoadArrays, state: Balance, op: int, device_count: int) -> None:
    """Move an op and those after or before it in the order to the device that follows the run.

    This shifts a border between two parts of the order. If the run ends before it meets another
    device, the target is random.
    """
    random, home = state.random, int64(state.devices[op])
    step = 1 if uniform(random) < 0.5 else -1
    size = _any_size(state)
    target, at, length = home, state.position[op], 0
    while 0 <= at < len(state.order) and length < size and target == home:
        target = int64(state.devices[state.order[at]])
        at += step
        length += 1
    if target == home:
        target = _another(random, home, device_count)
    for k in range(length):
        other = int64(state.order[state.position[op] + k * step])
        if state.devices[other] == home and arrays.allowed[other, target]:
            _move(state, other, target)


@compiled_inline
def _any_size(state: Balance) -> int:
    """Return a size from 1 to N, log-uniformly distributed."""
    return int(len(state.devices) ** uniform(state.random))


@compiled_inline
def _another(random: NDArray[np.uint64], home: int, device_count: int) -> int:
    return int((home + 1 + below(random, device_count - 1)) % device_count)


@compiled_inline
def _move(state: Balance, op: int, target: int) -> None:
    group = state.group[op]
    first, end = 0, 1
    if group >= 0:
        first, end = state.group_start[group], state.group_start[group + 1]
    for k in range(first, end):
        member = state.members[k] if group >= 0 else op
        at = state.counters[MOVED]
        state.moved[at] = member
        state.moved_from[at] = state.devices[member]
        state.counters[MOVED] = at + 1
        state.devices[member] = target


@compiled_inline
def swap_sides(state: Balance) -> None:
    """Undo all recorded moves, or redo them."""
    for k in range(state.counters[MOVED]):
        op = state.moved[k]
        state.devices[op], state.moved_from[k] = state.moved_from[k], state.devices[op]


@compiled_inline
def _degree(arrays: LoadArrays, state: Balance, op: int) -> int:
    inputs = state.predecessor_start[op + 1] - state.predecessor_start[op]
    return int(inputs + arrays.successor_start[op + 1] - arrays.successor_start[op])


@compiled_inline
def _neighbour(arrays: LoadArrays, state: Balance, op: int, k: int) -> int:
    inputs = state.predecessor_start[op + 1] - state.predecessor_start[op]
    if k < inputs:
        return int(state.predecessors[state.predecessor_start[op] + k])
    return int(arrays.successors[arrays.successor_start[op] + k - inputs])
