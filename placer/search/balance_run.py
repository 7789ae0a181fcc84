"""One annealing run of the max-load search, with incremental updates of the loads.

Only the moved ops and those that feed them are recounted, so a move costs about as much as the
number of their edges, whatever the size of the graph.

The energy is smoother than the maximum: the 8-norm of the loads, times a penalty for missing
memory. The best placement is the feasible one with the smallest maximum load.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing, compiled_inline
from envs.max_load import (
    LoadArrays,
    Loads,
    count_all,
    count_op,
    largest_load,
    load_arrays,
    loads_for,
)
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.toy_problem import toy_problem
from placer.search.balance_moves import (
    BEST,
    BUSIEST,
    COUNTED,
    COUNTERS,
    MOVED,
    Balance,
    propose,
    swap_sides,
)
from placer.search.randomness import exponential, seeded

COLD: Final = 1e-5
"""Relative temperature at the end; it falls geometrically from the initial one."""


class Balancing:
    """One annealing run, possibly in pieces; its best placement is never worse than the start."""

    def __init__(
        self, problem: Problem, start: NDArray[np.int32], order: NDArray[np.int32], seed: int
    ) -> None:
        """Start from an allowed placement (N,); the moves of runs follow ``order`` (N,)."""
        graph = problem.graph
        count = len(graph)
        grouped = np.flatnonzero(graph.group >= 0).astype(np.int32)
        sizes = np.bincount(graph.group[grouped], minlength=0)
        self.arrays = load_arrays(problem)
        self.loads = loads_for(self.arrays)
        self._state = Balance(
            devices=start.copy(),
            best_devices=start.copy(),
            energy=np.zeros(1),
            order=np.array(order, np.int32),
            position=np.argsort(order).astype(np.int32),
            group=graph.group.copy(),
            group_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            members=grouped[np.argsort(graph.group[grouped], kind="stable")],
            predecessor_start=graph.predecessor_start.copy(),
            predecessors=graph.predecessors.copy(),
            moved=np.zeros(2 * count, np.int32),
            moved_from=np.zeros(2 * count, np.int32),
            counted=np.zeros(count, np.int32),
            is_counted=np.zeros(count, np.bool_),
            counters=np.zeros(COUNTERS, np.int64),
            random=seeded(seed),
        )
        _begin(self.arrays, self.loads, self._state)

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
        _anneal(
            self.arrays,
            self.loads,
            self._state,
            int(steps),
            int(first),
            int(total),
            float(hot),
        )


@compiled_borrowing
def _begin(arrays: LoadArrays, loads: Loads, state: Balance) -> None:
    fits = count_all(arrays, loads, state.devices)
    state.counters[BEST] = largest_load(loads) if fits else INFEASIBLE_NS
    state.energy[0] = _energy(arrays, loads, state)


@compiled_borrowing
def _anneal(
    arrays: LoadArrays,
    loads: Loads,
    state: Balance,
    steps: int,
    first: int,
    total: int,
    hot: float,
) -> None:
    device_count = len(loads.load_ns)
    for step in range(steps):
        progress = min((first + step) / total, 1.0)
        temperature = hot * (COLD / hot) ** progress
        state.counters[MOVED] = 0
        propose(arrays, state, device_count)
        if state.counters[MOVED] == 0:
            continue
        _recount(arrays, loads, state)
        energy = _energy(arrays, loads, state)
        if energy <= state.energy[0] * (1.0 + exponential(state.random, temperature)):
            state.energy[0] = energy
            if loads.cut[0] == 0 and _missing(arrays, loads) == 0.0:
                load = largest_load(loads)
                if load < state.counters[BEST]:
                    state.counters[BEST] = load
                    for i in range(len(state.devices)):
                        state.best_devices[i] = state.devices[i]
        else:
            swap_sides(state)
            _recount(arrays, loads, state)
            state.counters[BUSIEST] = _busiest(loads)


@compiled_inline
def _recount(arrays: LoadArrays, loads: Loads, state: Balance) -> None:
    """Update the loads from those before the move to those after it."""
    state.counters[COUNTED] = 0
    for k in range(state.counters[MOVED]):
        op = state.moved[k]
        _note(state, op)
        for e in range(state.predecessor_start[op], state.predecessor_start[op + 1]):
            _note(state, state.predecessors[e])
    swap_sides(state)
    for k in range(state.counters[COUNTED]):
        count_op(arrays, loads, state.devices, state.counted[k], -1)
    swap_sides(state)
    for k in range(state.counters[COUNTED]):
        count_op(arrays, loads, state.devices, state.counted[k], 1)
        state.is_counted[state.counted[k]] = False


@compiled_inline
def _note(state: Balance, op: int) -> None:
    if not state.is_counted[op]:
        state.is_counted[op] = True
        state.counted[state.counters[COUNTED]] = op
        state.counters[COUNTED] += 1


@compiled_inline
def _energy(arrays: LoadArrays, loads: Loads, state: Balance) -> float:
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
    run = Balancing(problem, start, problem.graph.topological, 0)
    run.run(10, first=0, total=10, hot=0.1)
