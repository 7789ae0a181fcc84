"""Learned list scheduler, which decodes 21 weights to a placement.

Repeatedly the ready op with the highest order score is put on the device with the highest device
score. The order score of op v is ``order_base[v] + w[:7] . op_features[:, v]``; the score of
device d is ``w[7:] . f(v, d)`` with fourteen features of the partial schedule. Times are in units
of the ``scale``, "regret" is the distance to the smallest value over the devices, and L is the soft
logarithm of :func:`placer.search.list_scheduler.soft_log.soft_log`:

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

from envs.compiled import (
    compiled_borrowing,
    compiled_inline,
    compiled_rows,
    index,
    prefetch,
)
from envs.problem import Floats, Ints, Singles
from placer.search.list_scheduler.arrays import OP_FEATURE_COUNT, SchedulingArrays
from placer.search.list_scheduler.device_scores import best_device
from placer.search.list_scheduler.partial_schedule import (
    PartialSchedule,
    commit,
    empty_schedule,
    pop,
    push,
    release,
    reset,
)
from placer.search.list_scheduler.sight import BLIND, SIGHT_COUNT, Sight, add_order
from placer.search.list_scheduler.sorting import sort_ops

DEVICE_FEATURE_COUNT: Final = 14
WEIGHT_COUNT: Final = OP_FEATURE_COUNT + DEVICE_FEATURE_COUNT
AHEAD: Final = 128
"""Number of ops in the order that later ops are loaded ahead."""
LINE_FLOATS: Final = 16
"""Numbers in a line of the cache."""


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
    rows = np.array(weights, np.float32, order="C")
    width = WEIGHT_COUNT + (SIGHT_COUNT if sight is not None else 0)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"weights are of shape {rows.shape}, not (B, {width})")
    if not np.isfinite(rows).all():
        raise ValueError("weights are not all finite numbers")
    if sight is None:
        sight = BLIND
        rows = np.concatenate([rows, np.zeros((len(rows), SIGHT_COUNT), np.float32)], axis=1)
    devices = np.full((len(rows), len(problem.cost)), -1, np.int32)
    priority = np.zeros(devices.shape)
    schedule = schedule or empty_schedule(problem)
    _decode(problem, schedule, sight, rows, devices, priority)
    return devices, priority


@compiled_borrowing
def _decode(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    weights: Singles,
    devices: Ints,
    priority: Floats,
) -> None:
    """Fill ``devices`` (B, N), initially -1, and ``priority`` (B, N)."""
    for row in range(len(weights)):
        _fill_order_scores(o, schedule.order_scores, weights[row])
        add_order(sight, schedule.order_scores, weights[row, WEIGHT_COUNT:])
        sort_ops(schedule)
        _decode_in_order(o, schedule, sight, weights[row], devices[row], priority[row])


@compiled_rows
def _fill_order_scores(o: SchedulingArrays, scores: Singles, weights: Singles) -> None:
    """Fill the order scores of all ops."""
    features = o.op_features
    a, b, c, d = weights[0], weights[1], weights[2], weights[3]
    e, f, g = weights[4], weights[5], weights[6]
    for v in range(len(scores)):
        score = o.order_base[v] + a * features[0, v] + b * features[1, v]
        score += c * features[2, v] + d * features[3, v]
        score += e * features[4, v] + f * features[5, v]
        scores[v] = score + g * features[6, v]


@compiled_inline
def _decode_in_order(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    weights: Singles,
    devices: Ints,
    priority: Floats,
) -> None:
    u, sighted = weights[OP_FEATURE_COUNT:WEIGHT_COUNT], weights[WEIGHT_COUNT:]
    count, order = len(devices), schedule.order
    reset(o, schedule)
    for k in range(count):
        v = index(order[k])
        schedule.rank[v] = k
        if schedule.waiting[v] == 0:
            push(schedule, k)
    for position in range(count):
        _prefetch_later(o, schedule, priority, position)
        v = index(order[index(pop(schedule))])
        _prefetch_times(o, schedule, v)
        heaviest_home = -1
        if o.heaviest_input[v] >= 0:
            heaviest_home = devices[index(o.heaviest_input[v])]
        chosen = schedule.pinned[o.group[v]] if o.group[v] >= 0 else -1
        if chosen < 0:  # no op of its group has decided
            chosen = best_device(o, schedule, sight, devices, u, sighted, v, heaviest_home)
        devices[v] = chosen
        priority[v] = count - position
        if heaviest_home >= 0:
            schedule.crowd[heaviest_home] -= 1.0
        commit(o, schedule, devices, v, chosen)
        if o.memory_matters:
            release(o, schedule, v, chosen)
        for s in range(o.successor_start[v], o.successor_start[v + 1]):
            w = index(o.successors[index(s)])
            schedule.waiting[w] -= 1
            if schedule.waiting[w] == 0:
                push(schedule, schedule.rank[w])
                schedule.crowd[devices[index(o.heaviest_input[w])]] += 1.0


@compiled_inline
def _prefetch_later(
    o: SchedulingArrays, schedule: PartialSchedule, priority: Floats, position: int
) -> None:
    """Load what belongs to ops further on in the order: about then they are placed."""
    order = schedule.order
    if position + 2 * AHEAD < len(order):
        v = index(order[position + 2 * AHEAD])
        prefetch(o.predecessor_start, v)
        prefetch(o.successor_start, v)
        _prefetch_row(o.cost, v)
        _prefetch_row(schedule.sent, v)
        prefetch(priority, v)
        v = index(order[position + AHEAD])
        e = o.predecessor_start[v]
        prefetch(o.predecessors, e)
        prefetch(o.edge_bytes, e)
        prefetch(o.edge_ns, e)
        prefetch(o.successors, o.successor_start[v])


@compiled_inline
def _prefetch_times(o: SchedulingArrays, schedule: PartialSchedule, v: int) -> None:
    """Load the rows of costs and arrivals that op v needs."""
    _prefetch_row(o.cost, v)
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        _prefetch_row(schedule.sent, index(o.predecessors[index(e)]))


@compiled_inline
def _prefetch_row(rows: Singles, v: int) -> None:
    width = rows.shape[1]
    for d in range(0, width, LINE_FLOATS):
        prefetch(rows, v * width + d)
