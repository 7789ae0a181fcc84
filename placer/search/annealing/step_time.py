"""Annealing of devices and op order towards a short step, guided by the critical chain.

Besides the moves of :mod:`placer.search.annealing.run`, one changes the rank of an op. The op is
mostly taken from the critical chain of the current placement: the ops that decided when the last
one ended. Where links are busy, the chain is mostly delayed by other transfers queued before its
own: with ``senders``, ops that send from the same device are moved, too. The acceptance threshold
is drawn before the simulation, so that the simulation can be aborted as soon as it exceeds the
threshold.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline, int64
from envs.problem import Floats, Ints
from envs.simulator import (
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    ProblemArrays,
    Workspace,
    simulate_core,
)
from envs.simulator.kernel.load import end_ns
from placer.search.annealing.blocks import Blocks
from placer.search.annealing.run import (
    BEST,
    FREE,
    MOVED,
    Annealing,
    AnnealingOptions,
    AnnealingState,
    below,
    change_devices,
    exponential,
    keep_if_best,
    new_state,
    temperature,
    undo_or_redo,
    uniform,
)
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.request import Meter

HOT: Final = 1e-3
"""Relative temperature at the start."""
ON_CHAIN: Final = 0.9
RANK_MOVES: Final = 0.2
EARLIER: Final = 0.7
MEAN_SHIFT: Final = 12.0
DRAWS: Final = 20
BLOCK_MOVES: Final = 0.2
"""Share of the moves of devices that move blocks, where there are blocks."""
OPTIONS: Final = AnnealingOptions(
    hot=HOT,
    swaps=0.1,
    runs=0.0,
    clusters=0.3,
    mean_cluster=6.0,
    large=0.0,
    least_spreading=0.7,
    most_spreading=0.7,
    to_neighbour=0.6,
    block_swaps=0.3,
)

MOST_STARTS: Final = 3
STEPS_PER_START: Final = 15_000
"""Minimum number of moves that justifies another start."""
MOVES_OF_OP: Final = 500
"""With more moves per op than this, annealing starts hotter."""
LARGEST_FACTOR: Final = 20.0

CURRENT: Final = FREE
CHAIN: Final = FREE + 1


@by_pointer
class Ranking(NamedTuple):
    """Data of N ops that only this energy needs, and its options."""

    priority: Floats  # (N,) N - rank
    best_priority: Floats  # (N,)
    chain: Ints  # (N,) the first counters[CHAIN] entries are the critical chain
    memory: int  # how the simulator treats memory
    senders: float


class StepTimeAnnealing(Annealing):
    """Annealing towards a short step; costs are those of :class:`Evaluator`."""

    def __init__(
        self,
        evaluator: Evaluator,
        start: Candidate,
        seed: int,
        *,
        hot: float = HOT,
        senders: float = 0.0,
        blocks: Blocks | None = None,
    ) -> None:
        """Start from a placement that respects the allowed devices of every op.

        ``hot`` is the initial relative temperature. ``senders`` is the share of the moves on the
        critical chain that go to other ops that send from the same device instead. Some moves are
        of ``blocks``, if there are any.
        """
        count = len(start.devices)
        order = np.lexsort((np.arange(count), -start.priority)).astype(np.int32)
        state = new_state(evaluator.problem, start.devices, order, seed, blocks)
        share = BLOCK_MOVES if blocks is not None and len(blocks.first) > 0 else 0.0
        super().__init__(state, OPTIONS._replace(hot=float(hot), blocks=share))
        self._evaluator = evaluator
        priority = (count - state.rank).astype(np.float64)
        self._ranking = Ranking(
            priority=priority,
            best_priority=priority.copy(),
            chain=np.zeros(count, np.int32),
            memory=evaluator.memory,
            senders=float(senders),
        )
        self._simulate()

    def adopt(self, other: StepTimeAnnealing) -> None:
        """Continue from the best placement of another run; this costs an evaluation."""
        state, ranking = self._state, self._ranking
        state.devices[:] = state.best_devices[:] = other._state.best_devices
        ranking.priority[:] = ranking.best_priority[:] = other._ranking.best_priority
        state.rank[:] = len(state.rank) - ranking.priority
        state.order[state.rank] = np.arange(len(state.rank))
        self._simulate()

    def _simulate(self) -> None:
        """Start from the current placement."""
        evaluator, state, priority = self._evaluator, self._state, self._ranking.priority
        cost = int(evaluator.costs(state.devices[None], priority[None])[0])
        _begin(evaluator.arrays, evaluator.work, state, self._ranking, cost)

    def _run(self, steps: int, first: int, total: int) -> None:
        arrays, work = self._evaluator.arrays, self._evaluator.work
        _anneal(arrays, work, self._state, self._ranking, self._options, steps, first, total)

    def best(self) -> Candidate:
        """Return the best placement so far."""
        devices, priority = self._state.best_devices, self._ranking.best_priority
        return self._evaluator.candidate(Kind.ANNEALING, devices, priority, self.best_cost)


def affordable_moves(evaluator: Evaluator, start: Candidate, meter: Meter) -> int:
    """Estimate how many moves the remaining budget allows; this may cost one evaluation."""
    steps = meter.left()
    if steps is None:
        assert meter.request.budget.seconds is not None
        began = meter.seconds()
        evaluator.costs(start.devices[None], start.priority[None])
        now = meter.seconds()
        steps = int((meter.request.budget.seconds - now) / max(now - began, 1e-6))
    return steps


def worthwhile_starts(moves: int) -> int:
    """Return from how many placements to anneal, given the total number of moves."""
    return max(1, min(MOST_STARTS, moves // STEPS_PER_START))


def initial_temperature(moves: int, op_count: int) -> float:
    """Return the initial relative temperature for this many moves from one placement.

    With few moves per op it pays to stay near the start, with many to leave it.
    """
    plenty = moves / (op_count * MOVES_OF_OP)
    return HOT * min(max(plenty**2, 1.0), LARGEST_FACTOR)


@compiled_borrowing
def _begin(
    arrays: ProblemArrays, work: Workspace, state: AnnealingState, ranking: Ranking, cost: int
) -> None:
    state.counters[CURRENT] = cost
    state.counters[BEST] = cost
    if cost != INFEASIBLE_NS:
        _follow_chain(arrays, work, state, ranking)


@compiled_borrowing
def _anneal(
    arrays: ProblemArrays,
    work: Workspace,
    state: AnnealingState,
    ranking: Ranking,
    options: AnnealingOptions,
    steps: int,
    first: int,
    total: int,
) -> None:
    random, counters = state.random, state.counters
    for step in range(steps):
        warmth = temperature(options.hot, (first + step) / total)
        op = _draw_op(state, ranking)
        old_rank = int64(state.rank[op])
        counters[MOVED] = 0
        if state.allowed.shape[1] == 1 or uniform(random) < RANK_MOVES:
            _shift(state, ranking, op, _draw_rank(random, old_rank, len(state.rank)))
            if state.rank[op] == old_rank:
                continue
        else:
            change_devices(state, options, op)
            if counters[MOVED] == 0:
                continue

        current = counters[CURRENT]
        limit = NO_LIMIT_NS
        if current != INFEASIBLE_NS:
            limit = current + int(current * exponential(random, warmth))
        cost = simulate_core(arrays, work, state.devices, ranking.priority, limit, ranking.memory)
        if cost <= limit:
            counters[CURRENT] = cost
            if cost != INFEASIBLE_NS:
                _follow_chain(arrays, work, state, ranking)
            if keep_if_best(state, cost):
                for i in range(len(ranking.priority)):
                    ranking.best_priority[i] = ranking.priority[i]
        else:
            undo_or_redo(state)
            if state.rank[op] != old_rank:
                _shift(state, ranking, op, old_rank)


@compiled_inline
def _draw_op(state: AnnealingState, ranking: Ranking) -> int:
    random = state.random
    op = below(random, len(state.devices))
    if state.counters[CHAIN] > 0 and uniform(random) < ON_CHAIN:
        op = int64(ranking.chain[below(random, state.counters[CHAIN])])
        if ranking.senders > 0.0 and uniform(random) < ranking.senders:
            op = _sender_beside(state, op)
    return op


@compiled_inline
def _sender_beside(state: AnnealingState, op: int) -> int:
    """Return another op on this device that sends to a different one; op if none is drawn."""
    home = state.devices[op]
    for _ in range(DRAWS):
        other = below(state.random, len(state.devices))
        if state.devices[other] == home:
            for k in range(state.consumer_start[other], state.neighbour_start[other + 1]):
                if state.devices[state.neighbours[k]] != home:
                    return int(other)
    return op


@compiled_inline
def _draw_rank(random: NDArray[np.uint64], rank: int, count: int) -> int:
    shift = 1 + int(min(exponential(random, MEAN_SHIFT), count))
    if uniform(random) < EARLIER:
        shift = -shift
    return min(max(rank + shift, 0), count - 1)


@compiled_inline
def _shift(state: AnnealingState, ranking: Ranking, op: int, target: int) -> None:
    """Give op the rank ``target`` and shift the ops in between by one."""
    count = len(state.order)
    at = state.rank[op]
    step = 1 if target > at else -1
    while at != target:
        other = state.order[at + step]
        state.order[at] = other
        state.rank[other] = at
        ranking.priority[other] = count - at
        at += step
    state.order[at] = op
    state.rank[op] = at
    ranking.priority[op] = count - at


@compiled_inline
def _follow_chain(
    arrays: ProblemArrays, work: Workspace, state: AnnealingState, ranking: Ranking
) -> None:
    """Store the critical chain of the schedule just simulated."""
    last = 0
    latest = -1
    for i in range(len(state.devices)):
        end = end_ns(arrays, work, i, state.devices[i])
        if end > latest:
            latest = end
            last = i
    length = 0
    while last >= 0:
        ranking.chain[length] = last
        length += 1
        last = work.cause[last]
    state.counters[CHAIN] = length
