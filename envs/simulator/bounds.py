"""Lower bounds on the step time, and the reason why links let no placement run.

:func:`levels` are the longest paths to and from every op, the ranks that list schedulers order ops
by.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from envs.compiled import compiled_borrowing
from envs.problem import Bools, Floats, Ints, Longs, Problem
from envs.simulator.paths import UNREACHABLE_NS, Paths, paths_of
from envs.simulator.time_units import in_units, unit_for
from graphs.graph import PHASES, GraphArrays

ROUNDS: Final = 200
WEIGHT: Final = 1 << 16
"""Average integer weight per device."""
SAMPLED: Final = 20_000
"""Most ops that the weights are computed from; of more, every k-th one counts."""
MOST_WEIGHT: Final = 1 << 24
"""Maximum sum of the integer weights of all devices."""


def lower_bound_ns(problem: Problem) -> int:
    """Return the nanoseconds that every step takes at least; about 0.05 s for 1,000 ops.

    Two bounds hold, so the larger one counts. One is the pace, see :func:`pace_ns`. The other is,
    for every op, the time before it, its cost and the time after it, see :func:`paths_of`. With
    hosts, launches count by the pace of their threads, see :func:`thread_pace_ns`. A ValueError
    says why no placement can run, see :func:`missing_link`.
    """
    problem, unit_ns = _counted(problem)
    shares, total = _shares(problem.cost_ns, problem.allowed)
    paths = paths_of(problem, shares // total)
    if reason := _missing_link(problem, paths):
        raise ValueError(reason)
    around = int(_around(problem, *paths).max())
    return unit_ns * max(_rounded_up(shares, total), around, thread_pace_ns(problem))


def thread_pace_ns(problem: Problem) -> int:
    """Return the nanoseconds that the busiest thread of a host takes at least to issue its ops.

    The bound of :func:`pace_ns`, for threads instead of devices: an op occupies its thread for its
    launch, or on a synchronous device until it ends. 0 without hosts.
    """
    problem, unit_ns = _counted(problem)
    hosts = problem.hosts
    if hosts is None:
        return 0
    never = np.iinfo(np.int64).max
    issuing_ns = np.where(hosts.synchronous, problem.cost_ns, hosts.op_launch_ns)
    issuing_ns = np.where(problem.allowed, issuing_ns, never)
    of_thread = [
        issuing_ns[:, hosts.thread == thread].min(axis=1)
        for thread in range(int(hosts.thread.max()) + 1)
    ]
    by_thread = np.column_stack(of_thread)
    allowed = by_thread < never
    return unit_ns * _rounded_up(*_shares(np.where(allowed, by_thread, 0), allowed))


def pace_ns(problem: Problem, *, optimizer: bool = True) -> int:
    """Return the nanoseconds that the busiest device works at least, for any placement.

    Bounded by a feasible point of the dual of R||Cmax (Lenstra, Shmoys and Tardos, 1990): for
    device weights w that sum to 1, sum_i min_d w_d cost_id. It is computed in integers, so the
    bound is exact. Without ``optimizer``, its ops are left out: they do not repeat for every
    micro-batch.
    """
    problem, unit_ns = _counted(problem)
    counts = problem.graph.phase != PHASES.index("optimizer")
    rows = np.flatnonzero(counts | optimizer)
    if not len(rows):
        return 0
    return unit_ns * _rounded_up(*_shares(problem.cost_ns[rows], problem.allowed[rows]))


def load_bound_ns(problem: Problem) -> int:
    """Return a lower bound on the largest load: average work per device, or the costliest op."""
    return max(pace_ns(problem), int(problem.cheapest_ns().max(initial=0)))


def missing_link(problem: Problem) -> str:
    """Return the reason that missing links let no placement run, or ""."""
    if problem.connected.all():
        return ""
    problem, _ = _counted(problem)
    return _missing_link(problem, paths_of(problem))


def _counted(problem: Problem) -> tuple[Problem, int]:
    """Return the problem in units in which all costs are below 2**39, and the unit in ns."""
    launch_ns = () if problem.hosts is None else problem.hosts.op_launch_ns
    unit_ns = unit_for(max(int(problem.cost_ns.max(initial=0)), int(np.max(launch_ns, initial=0))))
    return in_units(problem, unit_ns, round_down=True), unit_ns


def _missing_link(problem: Problem, paths: Paths) -> str:
    graph, names = problem.graph, np.array(problem.cluster.names)
    stuck = np.flatnonzero(_around(problem, *paths) >= UNREACHABLE_NS)
    if not len(stuck):
        return ""
    source = np.repeat(np.arange(len(graph)), np.diff(graph.successor_start))
    reached = problem.allowed @ problem.connected
    cut = np.flatnonzero(~(reached[source] & problem.allowed[graph.successors]).any(axis=1))
    if not len(cut):
        i = int(stuck[0])
        home = ", ".join(names[problem.allowed[i]])
        return (
            f"op {graph.ids[i]!r} may run on {home}, but links lead from there to no devices for "
            "all ops before and after it; add a [[link]] to the cluster, or allow more devices"
        )
    u, v = int(source[cut[0]]), int(graph.successors[cut[0]])
    here, there = names[problem.allowed[u]], names[problem.allowed[v]]
    return (
        f"op {graph.ids[v]!r} may run on {', '.join(there)} and needs the output of "
        f"{graph.ids[u]!r}, which may run on {', '.join(here)}, but no link leads there; add a "
        f'[[link]] between = ["{here[0]}", "{there[0]}"] to the cluster, or allow more devices'
    )


def _around(problem: Problem, head_ns: Longs, tail_ns: Longs) -> Longs:
    """Return the time before, in and after every op, (N,), on its best device."""
    never = np.iinfo(np.int64).max
    around = np.where(problem.allowed, head_ns + problem.cost_ns + tail_ns, never)
    return np.asarray(around.min(axis=1), np.int64)


def _shares(cost_ns: Longs, allowed: Bools) -> tuple[Longs, int]:
    """Return the least weighted cost of every op, (N,), for the best weights found, and their sum.

    Each round assigns every op to the device of its least weighted cost, then raises the weights of
    overloaded devices; the bound holds for any weights.
    """
    sample = slice(None, None, -(-len(cost_ns) // SAMPLED))
    cost = np.where(allowed[sample], cost_ns[sample].astype(np.float64), np.inf)
    count = cost.shape[1]
    weight = np.full(count, 1 / count)
    best, best_weight = -1.0, weight
    for k in range(ROUNDS):
        weighted = cost * np.maximum(weight, 1e-12)
        choice = weighted.argmin(axis=1)
        value = float(weighted.min(axis=1).sum())
        if value > best:
            best, best_weight = value, weight
        load = np.bincount(choice, cost[np.arange(len(cost)), choice], minlength=count)
        step = 1.0 / (k + 1) ** 0.5
        weight = weight * np.exp(step * (load / max(load.max(), 1.0) - 1))
        weight = weight / weight.sum()
    # Costs are below 2**39: products stay within 63 bits.
    whole = np.rint(best_weight * min(count * WEIGHT, MOST_WEIGHT)).astype(np.int64)
    never = np.iinfo(np.int64).max
    shares = np.full(len(cost_ns), never)
    for d in range(count):  # one device at a time, to save memory
        np.minimum(shares, np.where(allowed[:, d], cost_ns[:, d] * whole[d], never), out=shares)
    return shares, int(whole.sum())


def _rounded_up(shares: Longs, total: int) -> int:
    summed: list[int] = shares.tolist()
    return -(-sum(summed) // total)


def levels(graph: GraphArrays, edge: Floats, cost: Floats) -> tuple[Floats, Floats]:
    """Return top and bottom levels of N ops, in the unit of ``cost`` (N,) and ``edge`` (E,).

    ``edge`` is ordered by target. The top level is the longest path from a source to the op,
    without the op; the bottom level (upward rank) is the longest path from the op to the end, with
    it.
    """
    head, tail = np.zeros(len(cost)), cost.copy()
    order, start, predecessors = graph.topological, graph.predecessor_start, graph.predecessors
    _fill_levels(order.copy(), start.copy(), predecessors.copy(), edge, cost, head, tail)
    return head, tail


@compiled_borrowing
def _fill_levels(
    topological: Ints,
    predecessor_start: Ints,
    predecessors: Ints,
    edge: Floats,
    cost: Floats,
    head: Floats,
    tail: Floats,
) -> None:
    """Fill ``head`` (N,), initially 0, and ``tail`` (N,), initially ``cost``."""
    count = len(cost)
    for position in range(count):
        v = topological[position]
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
            head[v] = max(head[v], head[u] + cost[u] + edge[e])
    for position in range(count - 1, -1, -1):
        v = topological[position]
        for e in range(predecessor_start[v], predecessor_start[v + 1]):
            u = predecessors[e]
            tail[u] = max(tail[u], cost[u] + edge[e] + tail[v])
