"""Prove a lower bound on the largest load of any placement, by a sweep over the ops of a graph.

Ops are placed one after the other. A state is all that later ops depend on: on which devices the
outputs still in use are, and the loads so far. All states within a load limit are kept, so if none
is left, no placement stays within the limit. This is the dynamic programming over downsets of
Tarnawski et al. (arXiv 2006.16423), with loads in the state because a device may have any ops,
contiguous or not.

If there are too many states, those with equal outputs and similar loads are merged, keeping the
smallest load of each device; if there are still too many, outputs with short transfers are treated
as free to send. Both are relaxations: the bound stays valid but becomes weaker. Memory, and links
slower than the best one, are ignored in the same way.
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
"""Relative to the known load: the sweeps stop when the gap between the bounds is this narrow."""
FINEST: Final = 4096
COARSEST: Final = 8
"""Similar loads are merged in cells: a limit is divided into FINEST down to COARSEST of them."""


def quick_load_bound_ns(problem: Problem) -> int:
    """Return a lower bound without a sweep: average work per device, or the most expensive op."""
    never = np.iinfo(np.int64).max
    cost_ns = np.where(problem.allowed, problem.cost_ns, never).min(axis=1)
    return max(bounds_of(problem).work_ns, int(cost_ns.max(initial=0)))


def load_bound_ns(
    problem: Problem, known_ns: int, *, states: int = STATES, sweeps: int = SWEEPS
) -> int:
    """Return a lower bound on the largest load; it equals ``known_ns`` if that is proven optimal.

    Args:
        problem: graph and cluster.
        known_ns: largest load of some known placement.
        states: maximum number of states per sweep, about 100 bytes each; more give a tighter bound.
        sweeps: maximum number of sweeps, each with another limit.
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
    """Sweeps over one problem; memory for the states is allocated once."""

    def __init__(self, problem: Problem, states: int) -> None:
        self.plan: SweepPlan
        self.plan, slots = sweep_plan(problem)
        self._free_ns = 0
        devices = problem.device_count
        self._old = states_for(states, slots, devices)
        self._new = states_for(states, slots, devices)

    def bound_ns(self, limit_ns: int) -> int:
        """Return the lower bound that a sweep proves, at most ``limit_ns + 1``; 0 if none."""
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
        # All states after the last op; count -1 if too many even for the coarsest cells.
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
