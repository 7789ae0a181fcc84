"""One annealing run, whatever its energy: its state, its moves and its temperature.

A move changes the device of an op (with its co-location group), of a connected cluster of ops, of a
run of ops in order, or of two ops that swap; on large graphs also of a block or of two, see
:mod:`placer.search.annealing.blocks`. It is recorded, so that it can be undone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline, int64
from envs.problem import Bools, Ints, Longs, Problem
from placer.search.annealing.blocks import Blocks, no_blocks
from placer.search.evaluator import Evaluator
from placer.search.request import Meter

COLD: Final = 1e-5
"""Relative temperature at the end; it falls geometrically from the initial one."""
FINEST: Final = 1_000_000_000
"""Steps of the schedule under a budget of seconds, unless the number of moves is given."""

BEST: Final = 0
MOVED: Final = 1
FREE: Final = 2
"""The first counter of the energy's own."""
COUNTERS: Final = 4

Random = NDArray[np.uint64]

_STAR: Final = np.uint64(0x2545F4914F6CDD1D)
_A: Final = np.uint64(12)
_B: Final = np.uint64(25)
_C: Final = np.uint64(27)
_UNUSED_BITS: Final = np.uint64(11)
_STEP: Final = 2.0**-53


@by_pointer
class AnnealingState(NamedTuple):
    """Placement of N ops in C co-location groups, the best one so far, and the last move."""

    devices: Ints  # (N,)
    best_devices: Ints  # (N,)
    order: Ints  # (N,) ops by rank
    rank: Ints  # (N,)
    allowed: Bools  # (N, D)
    neighbour_start: Ints  # (N + 1,)
    consumer_start: Ints  # (N,) where the consumers of an op begin among its neighbours
    neighbours: Ints  # (2 E,) for each op the ops that it reads, then its consumers
    group: Ints  # (N,) -1 for none
    group_start: Ints  # (C + 1,)
    members: Ints  # ops of all groups, group by group
    block_first: Ints  # (L, N) where the block of an op begins in L labellings
    block_end: Ints  # (L, N)
    block_members: Ints  # (L, N)
    moved: Ints  # (2 N,) the first counters[MOVED] entries are the moved ops
    moved_from: Ints  # (2 N,) their previous devices
    counters: Longs  # (COUNTERS,)
    random: Random  # (1,)


@by_pointer
class AnnealingOptions(NamedTuple):
    """Initial temperature, probabilities of the kinds of moves, and sizes.

    Without a swap, run or cluster one op moves. A cluster spreads to each neighbour with a
    probability that is drawn once per move.
    """

    hot: float  # relative to the cost
    swaps: float
    runs: float
    clusters: float
    mean_cluster: float  # ops
    large: float  # probability that a cluster has any number of ops
    least_spreading: float
    most_spreading: float
    to_neighbour: float  # probability that the target is the device of a neighbour
    blocks: float = 0.0  # probability of a move of a block
    block_swaps: float = 0.0  # probability that such a move swaps two blocks


class Annealing(ABC):
    """One annealing run, possibly in pieces; its best placement is never worse than the start.

    The result depends only on start, seed and schedule, not on how the run is cut into pieces.
    """

    def __init__(self, state: AnnealingState, options: AnnealingOptions) -> None:
        self._state = state
        self._options = options

    @property
    def best_cost(self) -> int:
        """Cost of the best placement so far."""
        return int(self._state.counters[BEST])

    def run(self, steps: int, *, first: int, total: int) -> None:
        """Make ``steps`` moves; move j is at ``(first + j) / total`` of the schedule."""
        Evaluator.count(steps)
        self._run(int(steps), int(first), int(total))

    @abstractmethod
    def _run(self, steps: int, first: int, total: int) -> None: ...


def anneal(
    annealing: Annealing, meter: Meter, *, end: float = 1.0, moves: int | None = None
) -> Iterator[int]:
    """Anneal until ``moves``, or the share ``end`` of the budget, are spent; yield the best costs.

    The schedule is compressed into what is left of the budget. A cost is yielded about every
    ``meter.chunk_s``.
    """
    begin, left = meter.share(), meter.left(end)
    total = min((count for count in (moves, left) if count is not None), default=FINEST)
    done, chunk = 0, 1
    while done < total and not meter.over(end):
        began = meter.seconds()
        steps = min(chunk, total - done)
        annealing.run(steps, first=done, total=total)
        meter.spend(steps)
        done += steps
        if left is None:
            done = max(done, int((meter.share() - begin) / max(end - begin, 1e-9) * total))
        chunk = meter.next_chunk(chunk, steps, meter.seconds() - began)
        yield annealing.best_cost


def new_state(
    problem: Problem, devices: Ints, order: Ints, seed: int, blocks: Blocks | None = None
) -> AnnealingState:
    """Return the state of a run that starts from ``devices`` (N,), with ops in ``order`` (N,)."""
    blocks = blocks or no_blocks()
    graph, count = problem.graph, problem.op_count
    grouped = np.flatnonzero(graph.group >= 0).astype(np.int32)
    sizes = np.bincount(graph.group[grouped], minlength=0)
    rank = np.empty(count, np.int32)
    rank[order] = np.arange(count, dtype=np.int32)
    start, consumer_start, neighbours = _neighbours(problem)
    return AnnealingState(
        devices=np.array(devices, np.int32),
        best_devices=np.array(devices, np.int32),
        order=np.array(order, np.int32),
        rank=rank,
        allowed=np.array(problem.allowed),
        neighbour_start=start,
        consumer_start=consumer_start,
        neighbours=neighbours,
        group=np.array(graph.group, np.int32),
        group_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        members=grouped[np.argsort(graph.group[grouped], kind="stable")],
        block_first=blocks.first,
        block_end=blocks.end,
        block_members=blocks.members,
        moved=np.zeros(2 * count, np.int32),
        moved_from=np.zeros(2 * count, np.int32),
        counters=np.zeros(COUNTERS, np.int64),
        random=seeded(seed),
    )


def _neighbours(problem: Problem) -> tuple[Ints, Ints, Ints]:
    """Return ``neighbour_start``, ``consumer_start`` and ``neighbours`` of a state."""
    graph, count = problem.graph, problem.op_count
    degrees = np.stack([np.diff(graph.predecessor_start), np.diff(graph.successor_start)], axis=1)
    is_input = np.repeat(np.tile([True, False], count), degrees.ravel())
    neighbours = np.empty(len(is_input), np.int32)
    neighbours[is_input] = graph.predecessors
    neighbours[~is_input] = graph.successors
    start = np.array(graph.predecessor_start + graph.successor_start, np.int32)
    consumer_start = np.array(start[:-1] + degrees[:, 0], np.int32)
    return start, consumer_start, neighbours


def seeded(seed: int) -> Random:
    """Return a state (1,) for :func:`uniform`; different seeds give unrelated sequences."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)


@compiled_borrowing
def uniform(state: Random) -> float:
    """Return the next number in 0 <= x < 1 (xorshift64*, Vigna: arXiv 1402.6246)."""
    x = state[0]
    x ^= x >> _A
    x ^= x << _B
    x ^= x >> _C
    state[0] = x
    return float((x * _STAR) >> _UNUSED_BITS) * _STEP


@compiled_borrowing
def below(state: Random, count: int) -> int:
    """Return an integer in 0 .. count - 1."""
    return int(uniform(state) * count)


@compiled_borrowing
def exponential(state: Random, mean: float) -> float:
    """Return a positive, exponentially distributed number."""
    return -float(np.log(1.0 - uniform(state))) * mean


@compiled_inline
def temperature(hot: float, progress: float) -> float:
    """Return the relative temperature at ``progress`` (1 at the end of the schedule)."""
    return float(hot * (COLD / hot) ** min(progress, 1.0))


@compiled_inline
def change_devices(state: AnnealingState, options: AnnealingOptions, op: int) -> None:
    """Draw and make a move of ``op``; none if an op is not allowed on its new device."""
    random, device_count = state.random, state.allowed.shape[1]
    home = int64(state.devices[op])
    if options.blocks > 0.0 and uniform(random) < options.blocks:
        _move_block(state, options, op, home)
        return
    kind = uniform(random)
    if kind < options.swaps:
        _swap(state, op, home)
        return
    if kind < options.swaps + options.runs:
        _move_run(state, op, home, device_count)
        return
    target = below(random, device_count)
    if uniform(random) < options.to_neighbour:
        target = _of_a_neighbour(state, op, target)
    if target == home:
        target = _another(random, home, device_count)
    if not state.allowed[op, target]:
        return
    _move(state, op, target)
    if kind < options.swaps + options.runs + options.clusters:
        _move_cluster(state, options, home, target)


@compiled_inline
def _swap(state: AnnealingState, op: int, home: int) -> None:
    other = below(state.random, len(state.devices))
    there = int64(state.devices[other])
    apart = state.group[op] < 0 or state.group[op] != state.group[other]
    if there != home and apart and state.allowed[op, there] and state.allowed[other, home]:
        _move(state, op, there)
        _move(state, other, home)


@compiled_inline
def _move_cluster(state: AnnealingState, options: AnnealingOptions, home: int, target: int) -> None:
    """Move neighbours on ``home`` along with the moved ops, breadth first."""
    random = state.random
    size = 2 + int(min(exponential(random, options.mean_cluster), len(state.devices)))
    if options.large > 0.0 and uniform(random) < options.large:
        size = _any_size(state)
    spreading = options.most_spreading
    if options.least_spreading < spreading:
        spreading -= (spreading - options.least_spreading) * uniform(random)
    leader = 0
    while leader < state.counters[MOVED] and state.counters[MOVED] < size:
        op = int64(state.moved[leader])
        leader += 1
        for k in range(state.neighbour_start[op], state.neighbour_start[op + 1]):
            other = int64(state.neighbours[k])
            if (
                state.devices[other] == home
                and state.allowed[other, target]
                and uniform(random) < spreading
            ):
                _move(state, other, target)
                if state.counters[MOVED] >= size:
                    return


@compiled_inline
def _move_run(state: AnnealingState, op: int, home: int, device_count: int) -> None:
    """Move an op and those after or before it in the order to the device that follows the run.

    This shifts a border between two parts of the order. If the run ends before it meets another
    device, the target is random.
    """
    random = state.random
    step = 1 if uniform(random) < 0.5 else -1
    size = _any_size(state)
    target, at, length = home, int64(state.rank[op]), 0
    while 0 <= at < len(state.order) and length < size and target == home:
        target = int64(state.devices[state.order[at]])
        at += step
        length += 1
    if target == home:
        target = _another(random, home, device_count)
    for k in range(length):
        other = int64(state.order[state.rank[op] + k * step])
        if state.devices[other] == home and state.allowed[other, target]:
            _move(state, other, target)


@compiled_inline
def _of_a_neighbour(state: AnnealingState, op: int, otherwise: int) -> int:
    """Return the device of a neighbour of ``op``, drawn at random; ``otherwise`` if it has none."""
    first = state.neighbour_start[op]
    degree = state.neighbour_start[op + 1] - first
    k = below(state.random, max(degree, 1))
    return int64(state.devices[state.neighbours[first + k]]) if degree > 0 else int64(otherwise)


@compiled_inline
def _move_block(state: AnnealingState, options: AnnealingOptions, op: int, home: int) -> None:
    """Move the ops of a block that are on ``home``, or swap them with those of another block."""
    random, device_count = state.random, state.allowed.shape[1]
    level = below(random, len(state.block_first))
    first, end = state.block_first[level, op], state.block_end[level, op]
    if uniform(random) < options.block_swaps:
        other = below(random, len(state.devices))
        target = int64(state.devices[other])
        begin = state.block_first[level, other]
        if target == home or begin == first:
            return
        _move_members(state, level, first, end, home, target, True)
        _move_members(state, level, begin, state.block_end[level, other], target, home, False)
        return
    target = below(random, device_count)
    if uniform(random) < options.to_neighbour:
        member = state.block_members[level, first + below(random, end - first)]
        target = _of_a_neighbour(state, member, target)
    if target == home:
        target = _another(random, home, device_count)
    _move_members(state, level, first, end, home, target, True)


@compiled_inline
def _move_members(
    state: AnnealingState, level: int, first: int, end: int, home: int, target: int, grouped: bool
) -> None:
    """Move members on ``home``; those of co-location groups, which move with it, if ``grouped``."""
    for k in range(first, end):
        op = state.block_members[level, k]
        movable = grouped or state.group[op] < 0
        if movable and state.devices[op] == home and state.allowed[op, target]:
            _move(state, op, target)


@compiled_inline
def _any_size(state: AnnealingState) -> int:
    """Return a size from 1 to N, log-uniformly distributed."""
    return int(len(state.devices) ** uniform(state.random))


@compiled_inline
def _another(random: Random, home: int, device_count: int) -> int:
    return int((home + 1 + below(random, device_count - 1)) % device_count)


@compiled_inline
def _move(state: AnnealingState, op: int, target: int) -> None:
    """Move an op and its group, and record it."""
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
def undo_or_redo(state: AnnealingState) -> None:
    """Exchange the devices of the moved ops before and after the move."""
    for k in range(state.counters[MOVED]):
        op = state.moved[k]
        state.devices[op], state.moved_from[k] = state.moved_from[k], state.devices[op]


@compiled_inline
def keep_if_best(state: AnnealingState, cost: int) -> bool:
    """Store the devices if their cost is the lowest so far; return whether it is."""
    if cost >= state.counters[BEST]:
        return False
    state.counters[BEST] = cost
    for i in range(len(state.devices)):
        state.best_devices[i] = state.devices[i]
    return True
