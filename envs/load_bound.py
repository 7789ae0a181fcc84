"""A proof that no placement has a smaller largest load, by sweeping over the ops of a graph.

Ops are placed one after the other. What the past means to the future is where the outputs in use
are, and the loads so far: a state. All states within a limit are kept, so where none is left, no
placement keeps within the limit. This is the dynamic programming over downsets of Tarnawski et al.
(arXiv 2006.16423), with loads in the state because a device may have any ops, contiguous or not.

Where there are too many states, those of equal outputs and similar loads become one, with the
smallest load of each device; and where there still are, outputs that are sent quickly count as sent
for nothing. No placement within the limit is lost by that, so what is proven holds, but less is
proven. Memory, and links that are slower than the best, are left out in the same spirit.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from envs.bounds import bounds_of
from envs.problem import Problem
from envs.sweep_plan import SweepPlan, sweep_plan
from envs.sweep_states import MOST_DEVICES, States, advance, states_for

STATES: Final = 100_000
SWEEPS: Final = 8
CLOSE: Final = 0.002
"""Of the known load: a range of bounds so narrow is not worth a further sweep."""
FINEST: Final = 4096
COARSEST: Final = 8
"""Similar loads are in the same of so many parts of the limit."""


def quick_load_bound_ns(problem: Problem) -> int:
    """What no placement can beat, at once: the work over all devices, or the heaviest op."""
    never = np.iinfo(np.int64).max
    cost_ns = np.where(problem.allowed, problem.cost_ns, never).min(axis=1)
    return max(bounds_of(problem).work_ns, int(cost_ns.max(initial=0)))


def load_bound_ns(
    problem: Problem, known_ns: int, *, states: int = STATES, sweeps: int = SWEEPS
) -> int:
    """A largest load that no placement can beat; ``known_ns`` itself where that is the optimum.

    Args:
        problem: what to place where.
        known_ns: the largest load of some placement.
        states: how many states a sweep may keep, of about 100 bytes; the more, the tighter.
        sweeps: how often to sweep, each with another limit.
    """
    bound_ns = min(quick_load_bound_ns(problem), known_ns)
    if problem.device_count > MOST_DEVICES:
        return bound_ns
    sweep = Sweep(problem, states)
    above_ns, limit_ns = known_ns, known_ns - 1
    for _ in range(sweeps):
        proven_ns = sweep.bound_ns(limit_ns)
        bound_ns = max(bound_ns, proven_ns)
        if proven_ns <= limit_ns:
            above_ns = limit_ns
        if above_ns - bound_ns <= CLOSE * known_ns:
            break
        limit_ns = (bound_ns + above_ns) // 2
    return min(bound_ns, known_ns)


class Sweep:
    """Sweeps over one problem; room for the states is made once."""

    def __init__(self, problem: Problem, states: int) -> None:
        """Decide on the order of the ops."""
        self.plan: SweepPlan
        self.plan, slots = sweep_plan(problem)
        self._free_ns = 0
        devices = problem.device_count
        self._old = states_for(states, slots, devices)
        self._new = states_for(states, slots, devices)

    def bound_ns(self, limit_ns: int) -> int:
        """What no placement can beat: ``limit_ns + 1`` at the most, 0 if nothing was proven."""
        free_ns = self._free_ns // 4
        while free_ns <= limit_ns:
            count, states = self._sweep(limit_ns, free_ns)
            self._free_ns = free_ns
            if count == 0:
                return limit_ns + 1
            if count > 0:
                load_ns = int(states.load_ns[:count].max(axis=1).min())
                average_ns = -(-int(states.spent_ns[:count].min()) // states.load_ns.shape[1])
                return int(max(load_ns, average_ns))
            free_ns = max(2 * free_ns, limit_ns // FINEST, 1)
        return 0

    def _sweep(self, limit_ns: int, free_ns: int) -> tuple[int, States]:
        """All states after the last op, or -1 of them where they were too many for any cell."""
        old, new = self._old, self._new
        old.where[0], old.load_ns[0], old.spent_ns[0] = 0, 0, 0
        count, cell_ns = 1, 1
        for i in range(len(self.plan.send_ns)):
            cell_ns = max(cell_ns // 4, 1)
            while (after := advance(self.plan, i, count, old, new, limit_ns, cell_ns, free_ns)) < 0:
                cell_ns = max(2 * cell_ns, limit_ns // FINEST)
                if cell_ns * COARSEST > limit_ns:
                    return -1, old
            count, old, new = after, new, old
            if count == 0:
                break
        return count, old
