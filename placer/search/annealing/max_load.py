"""Annealing towards a small largest load, in rounds that start from the best placement so far.

Only the moved ops and those that feed them are recounted, so a move costs about as much as the
number of their edges, whatever the size of the graph. The energy is smoother than the maximum: the
8-norm of the loads, times a penalty for missing memory. The best placement is the feasible one with
the smallest maximum load.

A round is short because it ends in one of many local optima that more moves do not leave. The first
rounds start from the best heuristics; later rounds draw their initial temperature at random.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline
from envs.problem import Bools, Floats, Ints, Problem, toy_problem
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
from placer.search.annealing.islands import anneal_islands
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
from placer.search.contiguous.orders import linear_orders
from placer.search.contiguous.parts import NEVER_NS, best_parts, device_orders, pipeline_parts
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics, ranked_by
from placer.search.request import MAX_LOAD, Meter, SearchRequest
from placer.search.workers import Workers

HOT: Final = 3e-2
COOLEST: Final = 1e-3
HOTTEST: Final = 1e-1
"""Initial relative temperatures: HOT for the first rounds, COOLEST .. HOTTEST for later ones."""
STARTS: Final = 3
FEWEST_MOVES: Final = 20_000
MOVES_PER_OP: Final = 500
"""A round has MOVES_PER_OP moves per op, at least FEWEST_MOVES; fewer if the budget ends."""
SEEDS_APART: Final = 1_000_003
SLACK: Final = 1.2
"""Contiguous parts are starts up to this multiple of the least known largest load."""
MOST_STEPS_OF_PARTS: Final = 60_000_000
"""Maximum number of steps to find contiguous parts, about half a second."""
SHARE_OF_PARTS: Final = 0.2
"""Most of a budget in seconds for it."""
ON_BUSIEST: Final = 0.7
TRIES: Final = 8
OPTIONS: Final = AnnealingOptions(
    hot=HOT,
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


def minimize_max_load(request: SearchRequest) -> list[Candidate]:
    """Return all heuristics, contiguous parts and the best annealed placement, best first.

    With a budget of evaluations, which are moves here, the seed determines the result.
    """
    load_compiled_code()  # before the budget starts
    problem, meter = request.problem, request.meter()
    evaluator = Evaluator(problem)
    candidates = heuristics(evaluator)
    if problem.device_count > 1:
        orders = linear_orders(problem)
        known = [candidate.devices for candidate in candidates]
        known += [] if request.start is None else [request.start.devices]
        parts = _least_loaded(problem, _contiguous_parts(problem, known, orders, meter))
        starts = _least_loaded(problem, known + parts)[:STARTS]
        with Workers(request.workers) as workers:
            best = _anneal_in_rounds(problem, starts, orders[-1], request.seed, meter, workers)
        by_level = evaluator.scheduling.bottom_level
        for kind, devices in ((Kind.CONTIGUOUS_PARTS, parts[0]), (Kind.ANNEALING, best)):
            candidates.append(evaluator.candidate(kind, devices, by_level))
    request.report(1.0, "done")
    return ranked_by(MAX_LOAD, problem, candidates)


def _contiguous_parts(
    problem: Problem, known: list[Ints], orders: list[Ints], meter: Meter
) -> list[Ints]:
    """Return contiguous parts (N,) for the orders of ops and of devices, at least one.

    Those much worse than the best known placement are not even looked for, and other orders are
    not once a fifth of the budget is spent.
    """
    rows = device_orders(problem)
    most_steps = MOST_STEPS_OF_PARTS // (len(orders) * len(rows))
    found: list[Ints] = []
    best_ns = int(max_load_ns(problem, np.array(known)).min())
    for order, row in product(orders, rows):
        if meter.over(SHARE_OF_PARTS):
            break
        below_ns = round(min(SLACK * best_ns, NEVER_NS))
        parts = best_parts(problem, order, row, below_ns=below_ns, most_steps=most_steps)
        if parts is not None:
            found.append(parts)
            best_ns = min(best_ns, int(max_load_ns(problem, parts)[0]))
    return found or [pipeline_parts(problem, orders[0])]


def _least_loaded(problem: Problem, placements: list[Ints]) -> list[Ints]:
    """Return distinct placements (N,) by their largest loads."""
    distinct = list({devices.tobytes(): devices for devices in placements}.values())
    order = np.argsort(max_load_ns(problem, np.array(distinct)), kind="stable")
    return [distinct[k] for k in order.tolist()]


def _anneal_in_rounds(
    problem: Problem,
    starts: list[Ints],
    order: Ints,
    seed: int,
    meter: Meter,
    workers: Workers,
) -> Ints:
    """Return the best placement (N,) of all rounds; at least one round is run.

    Every worker runs a round at once, from the best placement of all rounds that have ended.
    """
    rng = np.random.default_rng(seed)
    moves = max(FEWEST_MOVES, MOVES_PER_OP * problem.op_count)
    best: MaxLoadAnnealing | None = None
    number = 0
    while best is None or not meter.over():
        left = meter.left()
        together = workers.count if left is None else max(1, min(workers.count, left))
        rounds = []
        for _ in range(together):
            start, hot = starts[min(number, len(starts) - 1)], HOT
            if best is not None and number >= STARTS:
                start = best.best_devices
                hot = COOLEST * (HOTTEST / COOLEST) ** float(rng.random())
            own_seed = seed * SEEDS_APART + number
            rounds.append(MaxLoadAnnealing(problem, start, order, own_seed, hot=hot))
            number += 1
        lowest = INFEASIBLE_NS if best is None else best.best_cost
        for cost in anneal_islands(rounds, meter, workers, moves=moves):
            meter.note(Kind.ANNEALING.value, min(cost, lowest))
        best = min(rounds if best is None else [best, *rounds], key=lambda each: each.best_cost)
    return best.best_devices.copy()


@by_pointer
class Energy(NamedTuple):
    """Energy of the current placement of N ops, and the ops to be recounted after a move."""

    current: Floats  # (1,)
    changed: Ints  # (N,) the first counters[CHANGED] entries
    is_changed: Bools  # (N,)


class MaxLoadAnnealing(Annealing):
    """Annealing towards a small maximum load, ``INFEASIBLE_NS`` as long as none is feasible."""

    def __init__(
        self, problem: Problem, start: Ints, order: Ints, seed: int, *, hot: float = HOT
    ) -> None:
        """Start from an allowed placement (N,); the moves of runs follow ``order`` (N,)."""
        super().__init__(new_state(problem, start, order, seed), OPTIONS._replace(hot=hot))
        self._arrays = load_arrays(problem)
        self._loads = loads_for(self._arrays)
        self._energy = Energy(
            current=np.zeros(1),
            changed=np.zeros(problem.op_count, np.int32),
            is_changed=np.zeros(problem.op_count, np.bool_),
        )
        _begin(self._arrays, self._loads, self._state, self._energy)

    @property
    def best_devices(self) -> Ints:
        """The placement (N,) with the smallest maximum load so far."""
        return self._state.best_devices

    def _run(self, steps: int, first: int, total: int) -> None:
        arrays, loads, options = self._arrays, self._loads, self._options
        _anneal(arrays, loads, self._state, self._energy, options, steps, first, total)


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
    options: AnnealingOptions,
    steps: int,
    first: int,
    total: int,
) -> None:
    counters = state.counters
    for step in range(steps):
        warmth = temperature(options.hot, (first + step) / total)
        counters[MOVED] = 0
        change_devices(state, options, _draw_op(state))
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
    MaxLoadAnnealing(problem, start, problem.graph.topological, 0).run(10, first=0, total=10)
