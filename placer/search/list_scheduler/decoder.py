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
    LOG_COUNT,
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
from placer.search.list_scheduler.sight import (
    BLIND,
    DEVICE_SIGHT_COUNT,
    SIGHT_COUNT,
    Sight,
    add_sight,
    order_scores,
)

DEVICE_FEATURE_COUNT: Final = 14
WEIGHT_COUNT: Final = OP_FEATURE_COUNT + DEVICE_FEATURE_COUNT
MOST_CONSUMERS: Final = 6
MOST_SIBLINGS: Final = 8
FARTHEST_FINISH: Final = 10.0
ONE: Final = np.float32(1.0)
LOGARITHMIC: Final = (0, 2, 3, 5, 6, 7, 9, 10, 13)
"""Device features with a soft logarithm; that of the sight comes last."""


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
    sight: Sight | None = None,
) -> tuple[Ints, Floats]:
    """Return devices (B, N) and priorities (B, N) decoded from ``weights`` (B, 21).

    Pass ``schedule``, scratch space for the problem, to avoid its allocation in repeated calls.
    With ``sight``, rows end with the weights of its features: (B, 29).
    """
    rows = np.array(weights, np.float64, order="C")
    width = WEIGHT_COUNT + (SIGHT_COUNT if sight is not None else 0)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"weights are of shape {rows.shape}, not (B, {width})")
    if not np.isfinite(rows).all():
        raise ValueError("weights are not all finite numbers")
    scores = _order_scores(problem, rows)
    if sight is None:
        sight = BLIND
        rows = np.concatenate([rows, np.zeros((len(rows), SIGHT_COUNT))], axis=1)
    else:
        scores += order_scores(sight, rows[:, WEIGHT_COUNT:])
    orders = np.argsort(-scores, axis=1, kind="stable")
    devices = np.full(orders.shape, -1, np.int32)
    priority = np.zeros(orders.shape)
    schedule = schedule or empty_schedule(problem)
    _decode(problem, schedule, sight, orders, rows, devices, priority)
    return devices, priority


def _order_scores(problem: SchedulingArrays, rows: Floats) -> Floats:
    """Return order scores (B, N), summed feature by feature: the same on every machine."""
    scores = np.repeat(problem.order_base[None], len(rows), axis=0)
    for k in range(OP_FEATURE_COUNT):
        scores += rows[:, k, None] * problem.op_features[:, k]
    return scores


@compiled_borrowing
def _decode(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    orders: Longs,
    weights: Floats,
    devices: Ints,
    priority: Floats,
) -> None:
    """Fill ``devices`` (B, N), initially -1, and ``priority`` (B, N); ``orders`` (B, N) of ops."""
    for row in range(len(orders)):
        _decode_in_order(o, schedule, sight, orders[row], weights[row], devices[row], priority[row])


@compiled_inline
def _decode_in_order(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    order: Longs,
    weights: Floats,
    devices: Ints,
    priority: Floats,
) -> None:
    u, sighted = weights[OP_FEATURE_COUNT:WEIGHT_COUNT], weights[WEIGHT_COUNT:]
    uses_sight, uses_logs = False, sighted[1] != 0.0
    for k in range(DEVICE_SIGHT_COUNT):
        uses_sight |= sighted[k] != 0.0
    for f in LOGARITHMIC:
        uses_logs |= u[f] != 0.0
    count = len(devices)
    for k in range(count):
        schedule.rank[order[k]] = k
    size = reset(o, schedule)
    for position in range(count):
        v = order[pop(schedule.heap, size)]
        size -= 1
        chosen = schedule.pinned[o.group[v]] if o.group[v] >= 0 else -1
        if chosen < 0:  # no op of its group has decided
            latest = gather_inputs(o, schedule, devices, v)
            best_tier = rank_devices(o, schedule, v)
            _begin(o, schedule, u[1], v, best_tier, uses_logs)
            _add_shares(o, schedule, devices, u, v, latest)
            if uses_sight:
                add_sight(o, schedule, sight, sighted, v, best_tier)
            if uses_logs:
                _add_logs(schedule, u, sighted[1])
            chosen = _choose(schedule, best_tier)
        devices[v] = chosen
        priority[v] = count - position
        if schedule.heaviest_home[v] >= 0:
            schedule.crowd[schedule.heaviest_home[v]] -= 1.0
        commit(o, schedule, devices, v, chosen)
        release(o, schedule, v, chosen)
        for s in range(o.successor_start[v], o.successor_start[v + 1]):
            w = o.successors[s]
            schedule.waiting[w] -= 1
            if schedule.waiting[w] == 0:
                size = push(schedule.heap, size, schedule.rank[w])
                find_heaviest(o, schedule, devices, w)


@compiled_inline
def _begin(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    weight: float,
    v: int,
    best_tier: int,
    uses_logs: bool,
) -> None:
    """Start the values of op v's devices with feature 1, and fill the features for logarithms."""
    free, data, load, begin = schedule.free, schedule.data, schedule.load, schedule.begin
    device_count = len(free)
    least_start = np.inf
    least_finish = np.inf
    least_free = np.inf
    least_load = np.inf
    for d in range(device_count):
        begin[d] = max(free[d], data[d])
        if schedule.tier[d] == best_tier:
            least_start = min(least_start, begin[d])
            least_finish = min(least_finish, begin[d] + o.cost[v, d])
            least_free = min(least_free, free[d])
            least_load = min(least_load, load[d])
    unit = 1.0 / o.scale
    for d in range(device_count):
        regret = (begin[d] + o.cost[v, d] - least_finish) * unit
        schedule.value[d] = weight * min(regret, FARTHEST_FINISH)
        if uses_logs:
            at = d * LOG_COUNT
            logs = schedule.logs
            logs[at] = regret
            logs[at + 1] = (begin[d] - least_start) * unit
            logs[at + 2] = (free[d] - least_free) * unit
            logs[at + 3] = schedule.bring[d] * unit
            logs[at + 4] = max(data[d] - free[d], 0.0) * unit
            logs[at + 5] = max(free[d] - data[d], 0.0) * unit
            logs[at + 6] = (load[d] - least_load) * unit
            logs[at + 7] = max(schedule.queue_free[o.out_queue[d]] - begin[d], 0.0) * unit
            logs[at + 8] = schedule.crowd[d]
            logs[at + 9] = 0.0


@compiled_inline
def _add_shares(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    devices: Ints,
    u: Floats,
    v: int,
    latest: int,
) -> None:
    """Add the features of where inputs, and the consumers' other inputs, are."""
    value, device_count = schedule.value, len(schedule.free)
    if u[4] != 0.0:
        total = 0.0
        for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
            total += o.edge_ns[e]
        if total > 0.0:
            for d in range(device_count):
                value[d] += u[4] * schedule.have[d] / total
    if u[8] != 0.0:
        total = _siblings(o, v, devices, schedule.sibling)
        if total > 0.0:
            for d in range(device_count):
                value[d] += u[8] * schedule.sibling[d] / total
    if schedule.heaviest_home[v] >= 0:
        value[schedule.heaviest_home[v]] += u[11]
    if latest >= 0:
        value[latest] += u[12]


@compiled_inline
def _add_logs(schedule: PartialSchedule, u: Floats, of_sight: float) -> None:
    """Add the features with a soft logarithm to the values of the devices."""
    logs, value = schedule.logs, schedule.value
    for k in range(len(logs)):  # several at once, as a vector
        root = np.sqrt(np.sqrt(ONE + logs[k]))
        logs[k] = root - ONE / root
    for d in range(len(value)):
        at = d * LOG_COUNT
        total = of_sight * logs[at + LOG_COUNT - 1]
        for k, f in enumerate(LOGARITHMIC):
            total += u[f] * logs[at + k]
        value[d] += 2.0 * total


@compiled_inline
def _choose(schedule: PartialSchedule, best_tier: int) -> int:
    chosen = -1
    best = -np.inf
    for d in range(len(schedule.free)):
        value = schedule.value[d]
        if schedule.tier[d] != best_tier:
            continue
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
