"""Load: an op costs more while other devices of its machine compute.

The other devices are counted once all of them have picked their ops at the instant when it starts.
"""

from __future__ import annotations

from envs.compiled import compiled_inline, index
from envs.simulator.kernel.arrays import ProblemArrays, Workspace


@compiled_inline
def shares_machine(arrays: ProblemArrays, d: int, other: int) -> bool:
    """Return whether two different devices slow each other down."""
    machine = arrays.machine[index(d)]
    return bool((other != d) & (machine >= 0) & (arrays.machine[index(other)] == machine))


@compiled_inline
def extra_ns(arrays: ProblemArrays, i: int, d: int, busy: int, others: int) -> int:
    """Return the nanoseconds that op i costs more on d while some of the others compute."""
    if busy == 0:
        return 0
    extra = arrays.extra_ns[index(i), arrays.column[index(d)]]
    return int(extra if busy == others else (2 * extra * busy + others) // (2 * others))


@compiled_inline
def end_ns(arrays: ProblemArrays, work: Workspace, i: int, d: int) -> int:
    """Return the end of op i, which ran on d, of the schedule just simulated."""
    if arrays.has_load:
        return int(work.end_ns[index(i)])
    return int(work.start_ns[index(i)] + arrays.cost_ns[index(i), arrays.column[index(d)]])
