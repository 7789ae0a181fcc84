"""Learned list scheduler, which decodes 21 weights to a placement.

Repeatedly the ready op with the highest order score is put on the device with the highest device
score. The order score of op v is ``order_base[v] + w[:7] . op_features[v]``; the score of device d
is ``w[7:] . f(v, d)`` with fourteen features of the partial schedule. Times are in units of the
``scale``, "regret" is the distance to the smallest value over the devices, and L is the soft
logarithm of :func:`placer.search.list_scheduler.arrays.soft_log`:

 0 L(finish regret)                 7 L(wait for the device once the data is there)
 1 min(finish regret, 10)           8 share of the consumers' other inputs that are on d
 2 L(start regret)                  9 L(load regret)
 3 L(free-time regret)             10 L(backlog of d's outgoing queue beyond the start)
 4 share of inputs already on d    11 d is the device of the heaviest input
 5 L(transfer time still needed)   12 d is the device of the latest input
 6 L(wait for data on a free d)    13 L(ready ops whose heaviest input is on d)

The first op of a co-location group decides for the group. A device that would run out of memory is
excluded if another has room, and so is one that an input cannot reach. With the weights
:data:`HEFT` this is Heterogeneous Earliest Finish Time (Topcuoglu et al. 2002, without insertion).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing, compiled_inline
from envs.problem import Floats, Ints, Longs
from placer.search.list_scheduler.arrays import OP_FEATURE_COUNT, SchedulingArrays
from placer.search.list_scheduler.partial_schedule import (
    PartialSchedule,
    commit,
    empty_schedule,
    find_heaviest,
    gather_inputs,
    pop,
    push,
    rank_devices,
    release,
    reset,
)

DEVICE_FEATURE_COUNT: Final = 14
WEIGHT_COUNT: Final = OP_FEATURE_COUNT + DEVICE_FEATURE_COUNT
MOST_CONSUMERS: Final = 6
MOST_SIBLINGS: Final = 8
FARTHEST_FINISH: Final = 10.0


def _heft() -> Floats:
    weights = np.zeros(WEIGHT_COUNT)
    weights[OP_FEATURE_COUNT + 1] = -2.0
    weights.setflags(write=False)
    return weights


HEFT: Final = _heft()
"""Weights (21,) of the classic heuristic: highest upward rank first, earliest finish time."""


def decode(problem: SchedulingArrays, weights: NDArray[np.floating[Any]]) -> tuple[Ints, Floats]:
    """Return devices (N,) and priorities (N,) decoded from ``weights`` (21,)."""
    devices, priority = decode_batch(problem, np.asarray(weights)[None])
    return devices[0], priority[0]


def decode_batch(
    problem: SchedulingArrays,
    weights: NDArray[np.floating[Any]],
    schedule: PartialSchedule | None = None,
) -> tuple[Ints, Floats]:
    """Return devices (B, N) and priorities (B, N) decoded from ``weights`` (B, 21).

    Pass ``schedule``, scratch space for the problem, to avoid its allocation in repeated calls.
    """
    rows = np.array(weights, np.float64, order="C")
    if rows.ndim != 2 or rows.shape[1] != WEIGHT_COUNT:
        raise ValueError(f"weights are of shape {rows.shape}, not (B, {WEIGHT_COUNT})")
    if not np.isfinite(rows).all():
        raise ValueError("weights are not all finite numbers")
    orders = np.argsort(-_order_scores(problem, rows), axis=1, kind="stable")
    devices = np.full(orders.shape, -1, np.int32)
    priority = np.zeros(orders.shape)
    _decode(problem, schedule or empty_schedule(problem), orders, rows, devices, priority)
    return devices, priority


def _order_scores(problem: SchedulingArrays, rows: Floats) -> Floats:
    """Return order scores (B, N), summed feature by feature: the same on every machine."""
    scores = np.repeat(problem.order_base[None], len(rows), axis=0)
    for k in range(OP_FEATURE_COUNT):
        scores += rows[:, k, None] * problem.op_features[:, k]
    return scores


@compiled_inline
def soft_log1(x: float) -> float:
    """Compute :func:`placer.search.list_scheduler.arrays.soft_log` of a scalar."""
    root = np.sqrt(np.sqrt(1.0 + x))
    return float(2.0 * (root - 1.0 / root))


@compiled_borrowing
def _decode(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    orders: Longs,
    weights: Floats,
    devices: Ints,
    priority: Floats,
) -> None:
    """Fill ``devices`` (B, N), initially -1, and ``priority`` (B, N); ``orders`` (B, N) of ops."""
    for row in range(len(orders)):
        _decode_in_order(o, schedule, orders[row], weights[row], devices[row], priority[row])


@compiled_inline
def _decode_in_order(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    order: Longs,
    weights: Floats,
    devices: Ints,
    priority: Floats,
) -> None:
    u = weights[OP_FEATURE_COUNT:]
    count = len(devices)
    for k in range(count):
        schedule.rank[order[k]] = k
    size = reset(o, schedule)
    for position in range(count):
        v = order[pop(schedule.heap, size)]
        size -= 1
        latest = gather_inputs(o, schedule, devices, v)
        best_tier = rank_devices(o, schedule, v)
        chosen = _choose(o, schedule, devices, u, v, latest, best_tier)
        devices[v] = chosen
        priority[v] = count - position
        if schedule.heaviest_home[v] >= 0:
            schedule.crowd[schedule.heaviest_home[v]] -= 1.0
        commit(o, schedule, devices, v, chosen)
        release(o, schedule, devices, v, chosen)
        for s in range(o.successor_start[v], o.successor_start[v + 1]):
            w = o.successors[s]
            schedule.waiting[w] -= 1
            if schedule.waiting[w] == 0:
                size = push(schedule.heap, size, schedule.rank[w])
                find_heaviest(o, schedule, devices, w)


@compiled_inline
def _choose(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    devices: Ints,
    u: Floats,
    v: int,
    latest: int,
    best_tier: int,
) -> int:
    device_count = len(schedule.free)
    least_start = np.inf
    least_finish = np.inf
    least_free = np.inf
    least_load = np.inf
    for d in range(device_count):
        if schedule.tier[d] == best_tier:
            begin = max(schedule.free[d], schedule.data[d])
            least_start = min(least_start, begin)
            least_finish = min(least_finish, begin + o.cost[v, d])
            least_free = min(least_free, schedule.free[d])
            least_load = min(least_load, schedule.load[d])
    total_in = 0.0
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        total_in += o.edge_ns[e]
    total_sibling = 0.0
    if u[8] != 0.0:
        total_sibling = _siblings(o, v, devices, schedule.sibling)

    chosen = -1
    best = -np.inf
    for d in range(device_count):
        if schedule.tier[d] != best_tier:
            continue
        free, data = schedule.free[d], schedule.data[d]
        begin = max(free, data)
        regret = (begin + o.cost[v, d] - least_finish) / o.scale
        value = u[1] * min(regret, FARTHEST_FINISH)
        if u[0] != 0.0:
            value += u[0] * soft_log1(regret)
        if u[2] != 0.0:
            value += u[2] * soft_log1((begin - least_start) / o.scale)
        if u[3] != 0.0:
            value += u[3] * soft_log1((free - least_free) / o.scale)
        if u[4] != 0.0 and total_in > 0.0:
            value += u[4] * schedule.have[d] / total_in
        if u[5] != 0.0:
            value += u[5] * soft_log1(schedule.bring[d] / o.scale)
        if u[6] != 0.0 and data > free:
            value += u[6] * soft_log1((data - free) / o.scale)
        if u[7] != 0.0 and free > data:
            value += u[7] * soft_log1((free - data) / o.scale)
        if total_sibling > 0.0:
            value += u[8] * schedule.sibling[d] / total_sibling
        if u[9] != 0.0:
            value += u[9] * soft_log1((schedule.load[d] - least_load) / o.scale)
        q = o.out_queue[d]
        if u[10] != 0.0 and q >= 0 and schedule.queue_free[q] > begin:
            value += u[10] * soft_log1((schedule.queue_free[q] - begin) / o.scale)
        if d == schedule.heaviest_home[v]:
            value += u[11]
        if d == latest:
            value += u[12]
        if u[13] != 0.0:
            value += u[13] * soft_log1(schedule.crowd[d])
        if chosen < 0 or value > best:  # choose a device even if all values are NaN or -inf
            best = value
            chosen = d
    return chosen


@compiled_inline
def _siblings(o: SchedulingArrays, v: int, devices: Ints, sibling: Floats) -> float:
    """Fill ``sibling`` with transfer times of the consumers' other placed inputs; return the sum.

    Only the first :data:`MOST_SIBLINGS` inputs of the first :data:`MOST_CONSUMERS` consumers count.
    """
    sibling[:] = 0.0
    total = 0.0
    first = o.successor_start[v]
    for s in range(first, min(o.successor_start[v + 1], first + MOST_CONSUMERS)):
        w = o.successors[s]
        begin = o.predecessor_start[w]
        for e in range(begin, min(o.predecessor_start[w + 1], begin + MOST_SIBLINGS)):
            p = o.predecessors[e]
            if p != v and devices[p] >= 0:
                sibling[devices[p]] += o.edge_ns[e]
                total += o.edge_ns[e]
    return total
