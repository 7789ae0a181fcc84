"""Schedules of ops on one of two cores or on both at once, and a search for the best.

In a schedule an op takes one core or the set, which needs both cores free; a value that another
core made costs its hand-over; a core that goes from an op of its own to one of the set, or back,
waits for ``change_s``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine.set_runs import BOTH, Plan
from envs.compiled import compiled
from graphs.graph import GraphArrays

LONGEST_CHAIN: Final = 32
PASSES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A step of N ops on two cores and on the set of both."""

    graph: GraphArrays
    cost_s: NDArray[np.float64]  # (N, 2) on one core, on the set
    latency_s: float  # of a value from one core to the other
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best placements found: on single cores, and with sets {seconds of a change: ...}."""

    single_s: float
    single: NDArray[np.int32]
    with_sets_s: Mapping[float, float]
    with_sets: Mapping[float, NDArray[np.int32]]


@compiled
def schedule_s(
    order: NDArray[np.int32],
    place: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    hand_over_s: NDArray[np.float64],
    cost_s: NDArray[np.float64],
    change_s: float,
    end_s: NDArray[np.float64],
) -> float:
    """Return the step of ops in an order, each on core 0, core 1 or both; ``end_s`` is filled."""
    free_s = np.zeros(2)
    wide = np.zeros(2, np.bool_)
    for i in order:
        where = place[i]
        ready_s = 0.0
        for k in range(predecessor_start[i], predecessor_start[i + 1]):
            u = predecessors[k]
            apart = where + place[u] == 1  # one on core 0, the other on core 1
            ready_s = max(ready_s, end_s[u] + (hand_over_s[u] if apart else 0.0))
        if where == BOTH:
            changes = not (wide[0] and wide[1])
            start_s = max(free_s[0], free_s[1], ready_s) + (change_s if changes else 0.0)
            end_s[i] = start_s + cost_s[i, 1]
            free_s[:] = end_s[i]
            wide[:] = True
        else:
            start_s = max(free_s[where], ready_s) + (change_s if wide[where] else 0.0)
            end_s[i] = start_s + cost_s[i, 0]
            free_s[where] = end_s[i]
            wide[where] = False
    return float(max(free_s[0], free_s[1]))


@compiled
def improve(
    order: NDArray[np.int32],
    place: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    hand_over_s: NDArray[np.float64],
    cost_s: NDArray[np.float64],
    change_s: float,
    widths: int,
    steps: int,
    seed: int,
) -> float:
    """Improve ``place`` and return the step: first annealing, then each op by itself.

    A move puts a few ops that follow each other in the order, or that waited for each other, on one
    core or on the set.
    """
    np.random.seed(seed)
    count = len(order)
    end_s = np.zeros(count)
    now_s = schedule_s(
        order, place, predecessor_start, predecessors, hand_over_s, cost_s, change_s, end_s
    )
    best, best_s = place.copy(), now_s
    hottest = 0.5 * now_s / count
    moved = np.zeros(LONGEST_CHAIN, np.int32)
    before = np.zeros(LONGEST_CHAIN, np.int32)
    for step in range(steps):
        heat = hottest * (1.0 - step / steps) ** 2
        longest = 1 << np.random.randint(0, 6)
        at = np.random.randint(0, count)
        to = np.random.randint(0, widths)
        upstream = np.random.random() < 0.5
        length = 0
        i = order[at]
        while length < longest:
            moved[length], before[length] = i, place[i]
            place[i] = to
            length += 1
            if upstream:  # the input that came last
                latest = -1
                for k in range(predecessor_start[i], predecessor_start[i + 1]):
                    u = predecessors[k]
                    if latest < 0 or end_s[u] > end_s[latest]:
                        latest = u
                if latest < 0:
                    break
                i = latest
            else:
                at += 1
                if at == count:
                    break
                i = order[at]
        new_s = schedule_s(
            order, place, predecessor_start, predecessors, hand_over_s, cost_s, change_s, end_s
        )
        if new_s <= now_s or np.random.random() < np.exp((now_s - new_s) / max(heat, 1e-12)):
            now_s = new_s
            if now_s < best_s:
                best_s = now_s
                best[:] = place
        else:
            for k in range(length - 1, -1, -1):
                place[moved[k]] = before[k]
    place[:] = best
    for _ in range(PASSES):
        for i in order:
            for to in range(widths):
                was = place[i]
                place[i] = to
                new_s = schedule_s(
                    order,
                    place,
                    predecessor_start,
                    predecessors,
                    hand_over_s,
                    cost_s,
                    change_s,
                    end_s,
                )
                if new_s < best_s:
                    best_s = new_s
                else:
                    place[i] = was
    return best_s


def order_of(costs: Costs) -> NDArray[np.int32]:
    """Return ops by the longest way from their start to the end of the step, on one core."""
    graph = costs.graph
    rank = np.zeros(len(graph))
    for i in reversed(graph.topological.tolist()):
        readers = graph.successors[graph.successor_start[i] : graph.successor_start[i + 1]]
        rank[i] = costs.cost_s[i, 0] + rank[readers].max(initial=0.0)
    position = np.empty(len(graph))
    position[graph.topological] = np.arange(len(graph))
    return np.lexsort((position, -rank)).astype(np.int32)


def best_s(
    costs: Costs, change_s: float, starts: list[NDArray[np.int32]], widths: int, steps: int
) -> tuple[float, NDArray[np.int32]]:
    """Return the best step found from any of the starts, and its placement."""
    graph, order = costs.graph, order_of(costs)
    hand_over_s = costs.latency_s + graph.output_bytes / costs.bandwidth_bytes_per_s
    lists = graph.predecessor_start.copy(), graph.predecessors.copy()
    found = []
    for seed, start in enumerate(starts):
        place = start.copy()
        step_s = improve(
            order, place, *lists, hand_over_s, costs.cost_s, change_s, widths, steps, seed
        )
        found.append((step_s, place))
    return min(found, key=lambda one: one[0])


def searched(costs: Costs, steps: int, changes_s: Sequence[float]) -> Found:
    """Search schedules on single cores, and with sets for each cost of a change.

    Those with sets start from single cores and from the unplaced model.
    """
    count = len(costs.graph)
    alone, together = np.zeros(count, np.int32), np.full(count, BOTH, np.int32)
    halves = np.random.default_rng(0).integers(0, 2, count).astype(np.int32)
    _, single = best_s(costs, 0.0, [alone, halves], 2, steps)
    single_s, single = best_s(costs, 0.0, [single, single], 2, steps)  # searched as much
    starts, found = [together, single], {}
    for change_s in changes_s:
        found[change_s] = best_s(costs, change_s, starts, BOTH + 1, steps)
        starts = [*starts, found[change_s][1]]
    return Found(
        single_s=single_s,
        single=single,
        with_sets_s={change_s: step_s for change_s, (step_s, _) in found.items()},
        with_sets={change_s: place for change_s, (_, place) in found.items()},
    )


def plan_of(costs: Costs, place: NDArray[np.int32], change_s: float) -> Plan:
    """Return a placement with the order in which its ops start."""
    graph, end_s = costs.graph, np.empty(len(costs.graph))
    hand_over_s = costs.latency_s + graph.output_bytes / costs.bandwidth_bytes_per_s
    lists = graph.predecessor_start.copy(), graph.predecessors.copy()
    order = order_of(costs)
    schedule_s(order, place, *lists, hand_over_s, costs.cost_s, change_s, end_s)
    start_s = end_s - costs.cost_s[np.arange(len(place)), (place == BOTH).astype(np.intp)]
    return Plan(place=place, order=order[np.argsort(start_s[order], kind="stable")])


def changes(plan: Plan) -> int:
    """Return how often a core goes from an op of its own to one of the set, or back."""
    count, user = 0, [-1, -1]
    for op in plan.order:
        where = plan.place[op]
        for core in range(2) if where == BOTH else [where]:
            count += user[core] not in (-1, where)
            user[core] = where
    return count
