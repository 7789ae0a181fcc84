"""List schedulers that look beyond the op, for unequal devices: PEFT and HEFT with lookahead.

PEFT (Arabnejad and Barbosa, IEEE TPDS 25(3), 2014) adds to the finish of an op on a device the
optimistic cost from there: the time to the end of the step if all that follows runs on its best
device, without waiting. Lookahead (Bittencourt, Sakellariou and Madeira, PDP 2010) puts an op where
the last of its consumers, each on its best device, could end first. Both append to devices, without
insertion into gaps, and count memory, groups and links like the decoder.
"""

from __future__ import annotations

import numpy as np

from envs.compiled import compiled_borrowing, compiled_inline
from envs.problem import Floats, Ints, Longs
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.partial_schedule import (
    PartialSchedule,
    commit,
    empty_schedule,
    gather_inputs,
    pop,
    push,
    rank_devices,
    release,
    reset,
)


def peft(problem: SchedulingArrays) -> tuple[Ints, Floats]:
    """Return devices (N,) and priorities (N,) of Predict Earliest Finish Time."""
    costs = optimistic_costs(problem)
    rank = np.where(problem.allowed, costs, 0.0).sum(axis=1) / problem.allowed.sum(axis=1)
    return _scheduled(problem, rank, costs, looks_ahead=False)


def lookahead(problem: SchedulingArrays) -> tuple[Ints, Floats]:
    """Return devices (N,) and priorities (N,) of HEFT with lookahead."""
    costs = np.zeros(problem.cost.shape)
    return _scheduled(problem, problem.bottom_level, costs, looks_ahead=True)


def optimistic_costs(problem: SchedulingArrays) -> Floats:
    """Return the optimistic cost table, (N, D) ns: from an op's end on d to the end of the step."""
    costs, waiting = np.zeros(problem.cost.shape), np.diff(problem.successor_start)
    _fill_optimistic_costs(problem, waiting, np.zeros(len(waiting), np.int64), costs)
    return costs


def _scheduled(
    problem: SchedulingArrays, rank: Floats, costs: Floats, *, looks_ahead: bool
) -> tuple[Ints, Floats]:
    count, device_count = problem.cost.shape
    devices, priority = np.full(count, -1, np.int32), np.zeros(count)
    schedule = empty_schedule(problem)
    order = np.argsort(-rank, kind="stable")
    schedule.rank[order] = np.arange(count)
    data = np.zeros(device_count)
    _schedule(problem, schedule, order, costs, looks_ahead, data, devices, priority)
    return devices, priority


@compiled_borrowing
def _fill_optimistic_costs(o: SchedulingArrays, waiting: Ints, ready: Longs, costs: Floats) -> None:
    """Fill ``costs`` (N, D), initially 0; ``waiting`` (N,) counts the readers of every op."""
    device_count = costs.shape[1]
    size = 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            ready[size] = i
            size += 1
    while size > 0:
        size -= 1
        w = ready[size]
        least = np.inf
        for d in range(device_count):
            if o.allowed[w, d]:
                least = min(least, o.cost[w, d] + costs[w, d])
        for e in range(o.predecessor_start[w], o.predecessor_start[w + 1]):
            p = o.predecessors[e]
            elsewhere = least + o.edge_ns[e]
            for d in range(device_count):
                rest = elsewhere
                if o.allowed[w, d]:
                    rest = min(rest, o.cost[w, d] + costs[w, d])
                costs[p, d] = max(costs[p, d], rest)
            waiting[p] -= 1
            if waiting[p] == 0:
                ready[size] = p
                size += 1


@compiled_borrowing
def _schedule(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    order: Longs,
    costs: Floats,
    looks_ahead: bool,
    data: Floats,
    devices: Ints,
    priority: Floats,
) -> None:
    """Fill ``devices`` (N,), initially -1, and ``priority`` (N,); ``order`` is by rank."""
    count, device_count = o.cost.shape
    value = schedule.value
    size = reset(o, schedule)
    for position in range(count):
        v = order[pop(schedule.heap, size)]
        size -= 1
        gather_inputs(o, schedule, devices, v)
        best_tier = rank_devices(o, schedule, v)
        for d in range(device_count):
            schedule.begin[d] = max(schedule.free[d], schedule.data[d])
            value[d] = schedule.begin[d] + o.cost[v, d] + costs[v, d]
        if looks_ahead and o.successor_start[v] < o.successor_start[v + 1]:
            _look_ahead(o, schedule, data, devices, v)
        chosen = -1
        for d in range(device_count):
            if schedule.tier[d] == best_tier and (chosen < 0 or value[d] < value[chosen]):
                chosen = d
        devices[v] = chosen
        priority[v] = count - position
        commit(o, schedule, devices, v, chosen)
        release(o, schedule, devices, v, chosen)
        for s in range(o.successor_start[v], o.successor_start[v + 1]):
            w = o.successors[s]
            schedule.waiting[w] -= 1
            if schedule.waiting[w] == 0:
                size = push(schedule.heap, size, schedule.rank[w])


@compiled_inline
def _look_ahead(
    o: SchedulingArrays, schedule: PartialSchedule, data: Floats, devices: Ints, v: int
) -> None:
    """Set the value of each device for op v to when the last of its consumers could end.

    Each consumer on its own, with those of its inputs that are placed.
    """
    device_count = len(schedule.free)
    for d in range(device_count):
        schedule.value[d] = 0.0
    for s in range(o.successor_start[v], o.successor_start[v + 1]):
        w = o.successors[s]
        edge = 0
        for there in range(device_count):
            data[there] = 0.0
        for e in range(o.predecessor_start[w], o.predecessor_start[w + 1]):
            p = o.predecessors[e]
            if p == v:
                edge = e
            elif devices[p] >= 0:
                for there in range(device_count):
                    arrival = schedule.finish[p]
                    if there != devices[p]:
                        arrival += _sending(o, e, devices[p], there)
                    data[there] = max(data[there], arrival)
        for d in range(device_count):
            end = schedule.begin[d] + o.cost[v, d]
            least = np.inf
            for there in range(device_count):
                if not o.allowed[w, there]:
                    continue
                begin = max(data[there], end)
                if there != d:
                    begin = max(data[there], end + _sending(o, edge, d, there))
                    begin = max(begin, schedule.free[there])
                least = min(least, begin + o.cost[w, there])
            schedule.value[d] = max(schedule.value[d], least)


@compiled_inline
def _sending(o: SchedulingArrays, e: int, source: int, destination: int) -> float:
    return float(
        o.latency[source, destination] + o.edge_bytes[e] * o.ns_per_byte[source, destination]
    )
