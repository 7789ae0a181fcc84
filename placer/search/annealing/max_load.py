"""Annealing towards a small largest load, in rounds that start from the best placement so far.

Only the moved ops and those that feed them are recounted, so a move costs about as much as the
number of their edges, whatever the size of the graph. The energy is smoother than the maximum: the
8-norm of the loads, times a penalty for missing memory. The best placement is the feasible one with
the smallest maximum load.

A round is short because it ends in one of many local optima that more moves do not leave. The first
rounds start from the best heuristics; later rounds draw their initial temperature at random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline
from envs.problem import Problem, toy_problem
from envs.simulator import INFEASIBLE_NS
from envs.simulator.max_load import (
    LoadArrays,
    Loads,
    count_all,
    count_op,
    largest_load,
    load_arrays,
    loads_for,
    max_load_ns,
)
from placer.milliseconds import milliseconds
from placer.search.annealing.moves import (
    BEST,
    FREE,
    MOVED,
    AnnealingState,
    MoveShares,
    below,
    change_devices,
    exponential,
    keep_if_best,
    new_state,
    temperature,
    undo_or_redo,
    uniform,
)
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, Kind
from placer.search.contiguous import narrow_order, pipeline_parts
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.trace import SearchTrace

HOT: Final = 3e-2
COOLEST: Final = 1e-3
HOTTEST: Final = 1e-1
"""Initial relative temperatures: HOT for the first rounds, COOLEST .. HOTTEST for later ones."""
STARTS: Final = 3
FEWEST_MOVES: Final = 20_000
MOVES_PER_OP: Final = 500
"""A round has MOVES_PER_OP moves per op, at least FEWEST_MOVES; fewer if the budget ends."""
LARGEST_CHUNK: Final = 1 << 16
SEEDS_APART: Final = 1_000_003
MOST_OPS_IN_NARROW_ORDER: Final = 5000
"""Computing the narrow order takes seconds for larger graphs."""
ON_BUSIEST: Final = 0.7
TRIES: Final = 8
MOVES: Final = MoveShares(
    swaps=0.15,
    runs=0.05,
    clusters=0.35,
    mean_cluster=5.0,
    large=0.2,
    least_spreading=0.5,
    most_spreading=1.0,
    to_neighbour=0.7,
)

CHANGED: Final = FREE
BUSIEST: Final = FREE + 1


def minimize_max_load(
    problem: Problem,
    budget: Budget,
    seed: int,
    *,
    progress: Callable[[float, str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    search_trace: SearchTrace | None = None,
) -> list[Candidate]:
    """Search for a placement with a small maximum load.

    Args:
        problem: graph and cluster.
        budget: seconds, counted after compiled code is loaded, or moves. With moves the result
            depends on ``seed`` alone.
        seed: random seed.
        progress: called with the spent share of the budget, 0 .. 1, and a text.
        should_stop: polled about every 0.05 s.
        search_trace: records the improvements of the search, if given.

    Returns:
        All heuristics, contiguous parts and the best placement of the search, smallest load first.
    """
    load_compiled_code()
    meter = Meter(budget, should_stop, search_trace=search_trace)
    evaluator = Evaluator(problem)
    found = heuristics(evaluator)
    if problem.device_count > 1:
        orders = _orders(problem)
        level = evaluator.scheduling.bottom_level
        parts = (pipeline_parts(problem, order) for order in orders)
        found += [evaluator.candidate(Kind.CONTIGUOUS_PARTS, own, level) for own in parts]
        best = _anneal_in_rounds(
            problem, _by_load(problem, found), orders[-1], seed, meter, progress
        )
        found.append(evaluator.candidate(Kind.ANNEALING, best, level))
    if progress is not None:
        progress(1.0, "done")
    return _by_load(problem, found)


def _orders(problem: Problem) -> list[NDArray[np.int32]]:
    orders = [problem.graph.topological]
    if problem.op_count <= MOST_OPS_IN_NARROW_ORDER:
        orders.append(narrow_order(problem.graph))
    return orders


def _by_load(problem: Problem, plans: list[Candidate]) -> list[Candidate]:
    loads = max_load_ns(problem, np.array([plan.devices for plan in plans]))
    return [plans[i] for i in np.argsort(loads, kind="stable").tolist()]


def _anneal_in_rounds(
    problem: Problem,
    starts: list[Candidate],
    order: NDArray[np.int32],
    seed: int,
    meter: Meter,
    progress: Callable[[float, str], None] | None,
) -> NDArray[np.int32]:
    """Return the best placement (N,) of all rounds; at least one round is run."""
    rng = np.random.default_rng(seed)
    best: MaxLoadAnnealing | None = None
    number = 0
    while best is None or not meter.over():
        start, hot = starts[min(number, len(starts) - 1)].devices, HOT
        if best is not None and number >= STARTS:
            start = best.best_devices()
            hot = COOLEST * (HOTTEST / COOLEST) ** float(rng.random())
        run = MaxLoadAnnealing(problem, start, order, seed * SEEDS_APART + number)
        _spend(run, meter, hot, max(FEWEST_MOVES, MOVES_PER_OP * problem.op_count), best, progress)
        if best is None or run.best_ns < best.best_ns:
            best = run
        number += 1
    return best.best_devices()


def _spend(
    run: MaxLoadAnnealing,
    meter: Meter,
    hot: float,
    moves: int,
    best: MaxLoadAnnealing | None,
    progress: Callable[[float, str], None] | None,
) -> None:
    """Run one round; if the budget ends earlier, compress its schedule into what is left."""
    begin = meter.share()
    left = meter.left()
    total = moves if left is None else max(min(moves, left), 1)
    at, chunk = 0, 256
    while at < total and not meter.over():
        began = meter.seconds()
        steps = min(chunk, total - at)
        run.run(steps, first=at, total=total, hot=hot)
        meter.spend(steps)
        squeezed = (meter.share() - begin) / max(1.0 - begin, 1e-9) * total
        at = max(at + steps, int(squeezed)) if left is None else at + steps
        chunk = meter.next_chunk(chunk, steps, meter.seconds() - began, LARGEST_CHUNK)
        best_ns = run.best_ns if best is None else min(run.best_ns, best.best_ns)
        meter.note(Kind.ANNEALING.value, best_ns)
        if progress is not None:
            known = (
                "nothing fits" if best_ns == INFEASIBLE_NS else f"{milliseconds(best_ns / 1e9)} ms"
            )
            progress(min(meter.share(), 1.0), f"annealing, {known}")


@by_pointer
class Energy(NamedTuple):
    """Energy of the current placement of N ops, and the ops to be recounted after a move."""

    current: NDArray[np.float64]  # (1,)
    changed: NDArray[np.int32]  # (N,) the first counters[CHANGED] entries
    is_changed: NDArray[np.bool_]  # (N,)


class MaxLoadAnnealing:
    """One annealing run, possibly in pieces; its best placement is never worse than the start."""

    def __init__(
        self, problem: Problem, start: NDArray[np.int32], order: NDArray[np.int32], seed: int
    ) -> None:
        """Start from an allowed placement (N,); the moves of runs follow ``order`` (N,)."""
        self._arrays = load_arrays(problem)
        self._loads = loads_for(self._arrays)
        self._state = new_state(problem, start, order, seed)
        self._energy = Energy(
            current=np.zeros(1),
            changed=np.zeros(problem.op_count, np.int32),
            is_changed=np.zeros(problem.op_count, np.bool_),
        )
        _begin(self._arrays, self._loads, self._state, self._energy)

    @property
    def best_ns(self) -> int:
        """The smallest maximum load so far; ``INFEASIBLE_NS`` if nothing was feasible."""
        return int(self._state.counters[BEST])

    def best_devices(self) -> NDArray[np.int32]:
        """Return the placement (N,) with the smallest maximum load."""
        return self._state.best_devices.copy()

    def run(self, steps: int, *, first: int, total: int, hot: float) -> None:
        """Make ``steps`` moves; move j is at ``(first + j) / total`` of the schedule.

        ``hot`` is the initial relative temperature.
        """
        schedule = int(steps), int(first), int(total), float(hot)
        _anneal(self._arrays, self._loads, self._state, self._energy, MOVES, *schedule)


@compiled_borrowing
def _begin(arrays: LoadArrays, loads: Loads, state: AnnealingState, energy: Energy) -> None:
    fits = count_all(arrays, loads, state.devices)
    state.counters[BEST] = largest_load(loads) if fits else INFEASIBLE_NS
    energy.current[0] = _energy(arrays, loads, state)


@compiled_borrowing
def _anneal(
    arrays: LoadArrays,
    loads: Loads,
    state: AnnealingState,
    energy: Energy,
    moves: MoveShares,
    steps: int,
    first: int,
    total: int,
    hot: float,
) -> None:
    counters = state.counters
    for step in range(steps):
        warmth = temperature(hot, (first + step) / total)
        counters[MOVED] = 0
        change_devices(state, moves, _draw_op(state))
        if counters[MOVED] == 0:
            continue
        _recount(arrays, loads, state, energy)
        new = _energy(arrays, loads, state)
        if new <= energy.current[0] * (1.0 + exponential(state.random, warmth)):
            energy.current[0] = new
            if loads.cut[0] == 0 and _missing(arrays, loads) == 0.0:
                keep_if_best(state, largest_load(loads))
        else:
            undo_or_redo(state)
            _recount(arrays, loads, state, energy)
            counters[BUSIEST] = _busiest(loads)


@compiled_inline
def _draw_op(state: AnnealingState) -> int:
    op = below(state.random, len(state.devices))
    if uniform(state.random) < ON_BUSIEST:
        for _ in range(TRIES):
            if state.devices[op] == state.counters[BUSIEST]:
                break
            op = below(state.random, len(state.devices))
    return op


@compiled_inline
def _recount(arrays: LoadArrays, loads: Loads, state: AnnealingState, energy: Energy) -> None:
    """Update the loads from those before the move to those after it."""
    state.counters[CHANGED] = 0
    for k in range(state.counters[MOVED]):
        op = state.moved[k]
        _mark(state, energy, op)
        for e in range(state.neighbour_start[op], state.consumer_start[op]):
            _mark(state, energy, state.neighbours[e])
    undo_or_redo(state)
    for k in range(state.counters[CHANGED]):
        count_op(arrays, loads, state.devices, energy.changed[k], -1)
    undo_or_redo(state)
    for k in range(state.counters[CHANGED]):
        count_op(arrays, loads, state.devices, energy.changed[k], 1)
        energy.is_changed[energy.changed[k]] = False


@compiled_inline
def _mark(state: AnnealingState, energy: Energy, op: int) -> None:
    if not energy.is_changed[op]:
        energy.is_changed[op] = True
        energy.changed[state.counters[CHANGED]] = op
        state.counters[CHANGED] += 1


@compiled_inline
def _energy(arrays: LoadArrays, loads: Loads, state: AnnealingState) -> float:
    """Return the 8-norm of the loads in nanoseconds, times a penalty for infeasibility."""
    state.counters[BUSIEST] = _busiest(loads)
    most = float(loads.load_ns[state.counters[BUSIEST]])
    if most <= 0.0:
        return 0.0
    total = 0.0
    for d in range(len(loads.load_ns)):
        share = loads.load_ns[d] / most
        share *= share
        share *= share
        total += share * share
    return float(most * total**0.125 * (1.0 + 10.0 * _missing(arrays, loads) + loads.cut[0]))


@compiled_inline
def _missing(arrays: LoadArrays, loads: Loads) -> float:
    """Return the missing memory as a share of the total memory."""
    missing, room = 0.0, 1.0
    for d in range(len(loads.used_bytes)):
        missing += max(0, loads.used_bytes[d] - arrays.memory_bytes[d])
        room += arrays.memory_bytes[d]
    return missing / room


@compiled_inline
def _busiest(loads: Loads) -> int:
    most = 0
    for d in range(1, len(loads.load_ns)):
        if loads.load_ns[d] > loads.load_ns[most]:
            most = d
    return most


@cache
def load_compiled_code() -> None:
    """Compile the code of the search (once per installation), or load it from the cache."""
    problem = toy_problem()
    start = np.zeros(problem.op_count, np.int32)
    run = MaxLoadAnnealing(problem, start, problem.graph.topological, 0)
    run.run(10, first=0, total=10, hot=0.1)
