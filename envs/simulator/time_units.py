"""Times beyond what the compiled simulator counts, in units of a power of ten of nanoseconds.

The simulator counts steps below ``HORIZON_NS``. A longer step is simulated in the smallest unit
that makes it shorter. The unit is then at most 2e-11 of the step, so each rounding changes a time
by at most 1e-11 of the step, and even 100,000 such errors in a row stay below 1e-6. Times that are
whole multiples of the unit, as usual where time is abstract, are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from envs.problem import HORIZON_NS, Longs, Problem
from graphs.graph import frozen

LARGEST_UNIT_NS: Final = 10**7
"""So that the longest steps, of 174 years, stay within 63 bits of nanoseconds."""
SEARCHED: Final = 32
"""A search counts at least this many times the work of all ops, each on its fastest device."""


def unit_for(longest_ns: int) -> int:
    """Return the smallest power of ten, in nanoseconds, in which a time is below the horizon.

    >>> unit_for(10**11), unit_for(10**12), unit_for(10**18)
    (1, 10, 10000000)
    """
    unit_ns = 1
    while longest_ns >= HORIZON_NS * unit_ns:
        unit_ns *= 10
    return unit_ns


def search_unit_ns(problem: Problem, micro_batches: int = 1, single_ns: int = 0) -> int:
    """Return the unit for a search: 1 if the least work of all ops is below the horizon.

    That is their cost on their fastest devices, or ``single_ns``, the shortest step of a single
    device that can hold them all, if that is more.
    """
    work_ns = max(int(problem.cheapest_ns().sum()), single_ns) * micro_batches
    if work_ns < HORIZON_NS:
        return 1
    return min(unit_for(work_ns * SEARCHED), LARGEST_UNIT_NS)


def in_units(problem: Problem, unit_ns: int, *, round_down: bool = False) -> Problem:
    """Return a problem whose times are counted in units: what it calls 1 ns is ``unit_ns``.

    Times are rounded to the nearest unit, or down, so that bounds stay bounds.
    """
    if unit_ns == 1:
        return problem

    def counted(ns: Longs) -> Longs:
        units = ns // unit_ns if round_down else np.rint(ns / unit_ns)
        return frozen(units.astype(np.int64))

    cost_ns, hosts, load = counted(problem.cost_ns), problem.hosts, problem.load
    latency_s = problem.latency_s / unit_ns - (0.5e-9 if round_down else 0.0)
    return replace(
        problem,
        cost_ns=cost_ns,
        latency_s=frozen(latency_s),
        bandwidth_bytes_per_s=frozen(problem.bandwidth_bytes_per_s * unit_ns),
        hosts=None
        if hosts is None
        else replace(
            hosts,
            launch_ns=counted(hosts.launch_ns),
            op_launch_ns=counted(hosts.op_launch_ns),
            staging_bytes_per_s=hosts.staging_bytes_per_s * unit_ns,
        ),
        load=None
        if load is None
        else replace(load, extra_ns=frozen(counted(problem.cost_ns + load.extra_ns) - cost_ns)),
    )
