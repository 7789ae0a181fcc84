"""Decoding in sight of a plan: features of an earlier placement, and of unequal devices.

They complete those of :mod:`placer.search.list_scheduler.decoder`, with weights of their own. An
op's tail is the time from its start to the end of the step that the plan needs at least: the
longest path along the edges, with the plan's transfers, and along the ops of each device in order.
Device features:

 0 d was the op's device             3 L(cost above that of the op's cheapest device)
 1 L(regret of the end of the step)  4 L(cost at the devices' prices above the least)
 2 min(the same, 10)                 5 share of the op's consumers that were on d

The end of the step is the finish on d, plus the longest transfer to a consumer's device and the
consumer's tail. Order features: 6 how early the op started, 7 the length of its tail, both in units
of :data:`placer.search.list_scheduler.arrays.BASE_ORDER_SCORE`.

Prices of devices tell comparative advantage: with them, an op that a device does well is left to it
even if a faster device is free. They are dual variables of the assignment that balances all loads.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline, compiled_rows
from envs.problem import Bools, Floats, Ints, Problem, Singles
from placer.search.list_scheduler.arrays import BASE_ORDER_SCORE, SchedulingArrays, filled_up
from placer.search.list_scheduler.partial_schedule import ZERO, PartialSchedule
from placer.search.list_scheduler.soft_log import soft_log

SIGHT_COUNT: Final = 8
DEVICE_SIGHT_COUNT: Final = 6
ADVANTAGES: Final = np.array([3, 4])
"""Features of unequal devices; 0 on equal ones."""
OF_PLAN: Final = np.array([0, 1, 2, 5, 6, 7])
REPEATING: Final = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
"""Weights to begin with in sight of a plan, near which they keep."""
FARTHEST: Final = np.float32(10.0)
"""Largest regret of a feature that grows with it, in units of the scale."""
PRICED_OPS: Final = 1000
PRICE_ROUNDS: Final = 60


@by_pointer
class Sight(NamedTuple):
    """A plan of N ops with E edges for D devices, and the advantages of the devices."""

    home: Ints  # (N,) device in the plan
    order_features: Singles  # (2, N)
    tail: Singles  # (N,) ns from the op's start to the end of the step, of the plan
    send_ns: Singles  # (E,) mean transfer time by source, as successors
    excess: Singles  # (N, R) soft logarithm of the cost above the least
    waste: Singles  # (N, R) soft logarithm of the cost at the devices' prices above the least
    through: Singles  # (R,) scratch: latest end over the consumers, after the op's own, ns
    near: Singles  # (R,) scratch: transfer time to consumers on d, ns

    @property
    def equal_devices(self) -> bool:
        """Return whether no device has an advantage for any op."""
        return not self.excess.any()


def sight_of(problem: Problem, arrays: SchedulingArrays) -> Sight:
    """Return a sight of no plan yet; :func:`see` stores one."""
    count, devices = len(arrays.cost), arrays.device_count
    cost, allowed = arrays.device_cost, arrays.allowed
    pairs = problem.connected & ~np.eye(devices, dtype=np.bool_)
    send_ns = np.zeros(problem.graph.edge_count)
    if pairs.any():
        sizes = problem.graph.edge_bytes.astype(np.float64)
        send_ns += float(arrays.latency[:, :devices][pairs].mean())
        send_ns += sizes * float(arrays.ns_per_byte[:, :devices][pairs].mean())
    priced = cost * device_prices(cost, allowed)
    return Sight(
        home=np.full(count, -1, np.int32),
        order_features=np.zeros((2, count), np.float32),
        tail=np.zeros(count, np.float32),
        send_ns=send_ns.astype(np.float32),
        excess=filled_up(_above_least(cost, allowed, arrays.scale)),
        waste=filled_up(_above_least(priced, allowed, arrays.scale)),
        through=filled_up(np.zeros(devices, np.float32)),
        near=filled_up(np.zeros(devices, np.float32)),
    )


def device_prices(cost: NDArray[np.floating[Any]], allowed: Bools) -> Floats:
    """Return a price for each device (D,), 1 on average, high where devices are in demand.

    Each round assigns every op to the device where it costs least at the prices, and raises the
    prices of overloaded devices. Of large graphs a part of the ops is used, evenly spaced.
    """
    part = slice(None, None, -(-len(cost) // PRICED_OPS))
    cost = np.where(allowed, cost, np.inf)[part]
    ops, devices = np.arange(len(cost)), cost.shape[1]
    price = np.ones(devices)
    if (cost == cost[:, :1]).all():
        return price
    best, best_price = -1.0, price
    for k in range(PRICE_ROUNDS):
        priced = cost * price
        choice = priced.argmin(axis=1)
        value = float(priced[ops, choice].sum())
        if value > best:
            best, best_price = value, price
        load = np.bincount(choice, cost[ops, choice], minlength=devices)
        price = price * (1.0 + (load / (load.max() or 1.0) - 1.0) / (k + 2.0) ** 0.5)
        price = price / price.mean()
    return best_price


def _above_least(cost: NDArray[np.floating[Any]], allowed: Bools, scale: float) -> Singles:
    least = np.where(allowed, cost, np.inf).min(axis=1, keepdims=True)
    return soft_log(np.where(allowed, cost - least, 0.0) / scale)


BLIND: Final = Sight(
    home=np.zeros(0, np.int32),
    order_features=np.zeros((2, 0), np.float32),
    **{name: np.zeros(0, np.float32) for name in ("tail", "send_ns", "through", "near")},
    **{name: np.zeros((0, 0), np.float32) for name in ("excess", "waste")},
)
"""Stands for no sight, where all weights are 0."""


def see(
    sight: Sight, arrays: SchedulingArrays, devices: Ints, start_ns: Floats, order: Ints
) -> None:
    """Store the plan that starts ops on ``devices`` (N,) at ``start_ns`` (N,), in this order (N,).

    Of ops that start at once, producers come before their readers.
    """
    sight.home[:] = devices
    _fill_tails(arrays, sight, order)
    end = max(float(sight.tail.max()), 1.0)
    sight.order_features[0] = BASE_ORDER_SCORE * (1.0 - start_ns / end)
    sight.order_features[1] = BASE_ORDER_SCORE / end * sight.tail


@compiled_borrowing
def _fill_tails(o: SchedulingArrays, sight: Sight, order: Ints) -> None:
    """Fill ``tail`` (N,) from the last op to the first; ``order`` is that of their starts."""
    sight.near[:] = 0.0  # here: the tail of the last op seen on the device
    for k in range(len(order) - 1, -1, -1):
        v = order[k]
        home = sight.home[v]
        longest = sight.near[home]
        for e in range(o.successor_start[v], o.successor_start[v + 1]):
            w = o.successors[e]
            send = sight.send_ns[e] if sight.home[w] != home else ZERO
            longest = max(longest, send + sight.tail[w])
        sight.tail[v] = longest + o.cost[v, home]
        sight.near[home] = sight.tail[v]


@compiled_inline
def add_sight(
    o: SchedulingArrays,
    schedule: PartialSchedule,
    sight: Sight,
    weights: Singles,
    v: int,
) -> None:
    """Fill what the device features add, by their ``weights``, to the scores of op v's devices.

    Of that with a soft logarithm, only the number is filled.
    """
    value, through, near = schedule.sight_value, sight.through, sight.near
    device_count = len(value)
    for d in range(device_count):
        value[d] = weights[3] * sight.excess[v, d] + weights[4] * sight.waste[v, d]
    if sight.home[v] < 0:
        return
    value[sight.home[v]] += weights[0]
    if (weights[1] == ZERO) & (weights[2] == ZERO) & (weights[5] == ZERO):
        return
    for d in range(device_count):
        through[d] = near[d] = 0.0
    total = ZERO
    for e in range(o.successor_start[v], o.successor_start[v + 1]):
        w = o.successors[e]
        home, send = sight.home[w], sight.send_ns[e]
        at_home = max(through[home], sight.tail[w])
        there = sight.tail[w] + send
        for d in range(device_count):
            through[d] = max(through[d], there)
        through[home] = at_home
        near[home] += send
        total += send
    least = np.float32(np.inf)
    for d in range(device_count):
        through[d] += schedule.end[d]
        least = min(least, through[d] + schedule.barred[d])
    unit = np.float32(1.0 / o.scale)
    for d in range(device_count):
        regret = (through[d] - least) * unit
        schedule.sight_regret[d] = regret
        value[d] += weights[2] * min(regret, FARTHEST)
    if total > ZERO:
        for d in range(device_count):
            value[d] += weights[5] / total * near[d]


@compiled_inline
def add_order(sight: Sight, scores: Singles, weights: Singles) -> None:
    """Add the order features, by their weights, to the order scores (N,)."""
    if (weights[6] != ZERO) | (weights[7] != ZERO):
        _add_order(sight, scores, weights[6], weights[7])


@compiled_rows
def _add_order(sight: Sight, scores: Singles, early: np.float32, long: np.float32) -> None:
    features = sight.order_features
    for v in range(len(scores)):
        scores[v] += early * features[0, v] + long * features[1, v]
