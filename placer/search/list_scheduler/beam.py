"""Beam search for a schedule that wastes little of any device, near the order of a known plan.

Partial schedules grow op by op; of all that are one op longer, the least wasteful ones with
different placements are kept. Up to its front, the latest moment at which an op was started, a
schedule has used each device or left it idle. It costs

    sum_d price_d * max(free_d, front) - sum_v (least priced cost of v - urgency * start of v)

with sums over the devices and over its ops v: what it spent on idle devices, and on ops where they
are dear (see :func:`placer.search.list_scheduler.sight.device_prices`). Ops that the plan starts
late are a little dear, so that those which others wait for come first.

An evaluation simulates a placement whose devices never wait with an op ready, so an op that was
ready on a device before that device last waited would have run there earlier: such a schedule
is worth little. Links never queue here, and memory does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer, compiled_borrowing, compiled_inline, int64
from envs.problem import Floats, Ints, Longs
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.sight import device_prices

MOST_READY: Final = 64
"""Ready ops that a step considers: those that the plan starts first."""
DEVICES_AHEAD: Final = 3
"""Devices that a step considers besides those which are free at the front, the first to be free."""
OUT_OF_ORDER: Final = 1000.0
PLACED_AT_ONCE: Final = 4096
"""Ops placed in all schedules between two looks at the budget."""

Keys = NDArray[np.uint64]


@by_pointer
class _States(NamedTuple):
    """B partial schedules of N ops in C groups on D devices, and B choices for the next op each."""

    devices: Ints  # (B, N) -1 where not placed
    finish: Floats  # (B, N) ns
    waiting: Ints  # (B, N) inputs not yet placed
    ready: Ints  # (B, N) ready ops, as the plan starts them
    ready_count: Longs  # (B,)
    pinned: Ints  # (B, C) device of a group, or -1
    free: Floats  # (B, D) ns
    waited: Floats  # (B, D) start of the last op that the device waited for, ns
    front: Floats  # (B,) ns
    spent: Floats  # (B,) cost without the first sum
    key: Keys  # (B,) equal for equal placements
    live: Longs  # (B,) the schedules that are in use
    children: Longs  # (B,) choices that go on from a schedule
    value: Floats  # (B,) of choices, from here on; ascending costs
    parent: Longs  # (B,)
    op: Longs  # (B,)
    device: Longs  # (B,)
    begin: Floats  # (B,) ns
    new_spent: Floats  # (B,)
    new_key: Keys  # (B,)


class Beam:
    """Beam search for one problem; ``width`` is the number of schedules that are kept."""

    def __init__(self, arrays: SchedulingArrays, width: int) -> None:
        """Allocate the schedules."""
        count, devices = len(arrays.cost), arrays.device_count
        price = device_prices(arrays.device_cost, arrays.allowed)
        self._arrays = arrays
        self._price = price / price.sum()
        self._least = np.where(arrays.allowed, arrays.device_cost * self._price, np.inf).min(axis=1)
        random = np.random.default_rng(0)
        self._keys = random.integers(0, 1 << 63, (count, devices), np.int64).astype(np.uint64)
        self._alive = 1
        self._states = _States(
            devices=np.empty((width, count), np.int32),
            finish=np.zeros((width, count)),
            waiting=np.zeros((width, count), np.int32),
            ready=np.zeros((width, count), np.int32),
            pinned=np.zeros((width, len(arrays.group_resident)), np.int32),
            free=np.zeros((width, devices)),
            waited=np.zeros((width, devices)),
            key=np.zeros(width, np.uint64),
            new_key=np.zeros(width, np.uint64),
            front=np.zeros(width),
            spent=np.zeros(width),
            value=np.zeros(width),
            begin=np.zeros(width),
            new_spent=np.zeros(width),
            ready_count=np.zeros(width, np.int64),
            live=np.zeros(width, np.int64),
            children=np.zeros(width, np.int64),
            parent=np.zeros(width, np.int64),
            op=np.zeros(width, np.int64),
            device=np.zeros(width, np.int64),
        )

    def search(self, start_ns: Floats, *, urgency: float, eager: bool) -> tuple[Ints, Floats]:
        """Return devices (N,) and priorities (N,) near the order of a plan's starts (N,).

        ``urgency`` is relative to an average price. If ``eager``, the front is where the latest op
        starts; else it is where its device became free, so ops may be awaited at no cost.
        """
        for _ in self.steps(start_ns, urgency=urgency, eager=eager):
            pass
        return self.found()

    def steps(self, start_ns: Floats, *, urgency: float, eager: bool) -> Iterator[int]:
        """Search as :meth:`search` does, and yield the number of ops placed, a few at a time."""
        count, devices = len(self._arrays.cost), self._arrays.device_count
        rank = np.empty(count, np.int64)
        rank[np.argsort(start_ns, kind="stable")] = np.arange(count)
        spending = start_ns * (urgency / devices) - self._least
        each = max(PLACED_AT_ONCE // len(self._states.live), 1)
        for first in range(0, count, each):
            self._alive = _advance(
                self._arrays,
                self._states,
                self._price,
                spending,
                self._keys,
                rank,
                bool(eager),
                self._alive,
                first,
                min(first + each, count),
            )
            yield min(first + each, count)

    def found(self) -> tuple[Ints, Floats]:
        """Return devices (N,) and priorities (N,) of the shortest schedule of a whole search."""
        live = self._states.live[: self._alive]
        best = live[self._states.free[live].max(axis=1).argmin()]
        devices = self._states.devices[best].copy()
        cost = np.take_along_axis(self._arrays.cost, devices[:, None], axis=1)[:, 0]
        return devices, cost - self._states.finish[best]


@compiled_borrowing
def _advance(
    o: SchedulingArrays,
    s: _States,
    price: Floats,
    spending: Floats,
    keys: Keys,
    rank: Longs,
    eager: bool,
    alive: int,
    first: int,
    last: int,
) -> int:
    """Grow ``alive`` schedules from ``first`` to ``last`` ops; return how many there are then."""
    width = len(s.live)
    if first == 0:
        _reset(o, s, rank)
        alive = 1
    for _ in range(first, last):
        choices = int64(0)
        for ahead in (DEVICES_AHEAD, len(price)):
            if choices == 0:  # in the second round: ready ops may only go to other devices
                for k in range(alive):
                    choices = _extend(o, s, s.live[k], choices, price, spending, keys, eager, ahead)
        for slot in range(width):
            s.children[slot] = 0
        for k in range(choices):
            s.children[s.parent[k]] += 1
        spare = int64(0)
        for k in range(choices):
            slot = s.parent[k]
            s.children[slot] -= 1
            if s.children[slot] > 0:  # others go on from it, the last one in its place
                slot = _spare(s, spare, choices)
                spare = slot + 1
                _copy(s, s.parent[k], slot)
            s.live[k] = slot
        for k in range(choices):
            _place(o, s, s.live[k], k, rank, eager)
        alive = choices
    return int64(alive)


@compiled_inline
def _reset(o: SchedulingArrays, s: _States, rank: Longs) -> None:
    """Make schedule 0 the only one, and empty."""
    s.live[0] = 0
    s.ready_count[0] = 0
    s.front[0] = 0.0
    s.spent[0] = 0.0
    s.key[0] = 0
    for g in range(s.pinned.shape[1]):
        s.pinned[0, g] = -1
    for d in range(s.free.shape[1]):
        s.free[0, d] = 0.0
        s.waited[0, d] = 0.0
    for v in range(s.devices.shape[1]):
        s.devices[0, v] = -1
        s.waiting[0, v] = o.predecessor_start[v + 1] - o.predecessor_start[v]
        if s.waiting[0, v] == 0:
            _add_ready(s, 0, v, rank)


@compiled_inline
def _add_ready(s: _States, slot: int, v: int, rank: Longs) -> None:
    at = s.ready_count[slot]
    while at > 0 and rank[s.ready[slot, at - 1]] > rank[v]:
        s.ready[slot, at] = s.ready[slot, at - 1]
        at -= 1
    s.ready[slot, at] = v
    s.ready_count[slot] += 1


@compiled_inline
def _extend(
    o: SchedulingArrays,
    s: _States,
    slot: int,
    choices: int,
    price: Floats,
    spending: Floats,
    keys: Keys,
    eager: bool,
    ahead: int,
) -> int:
    """Add choices of a schedule to the best ones, and return their number."""
    front = s.front[slot]
    latest = _latest_free(s, slot, front, ahead)
    spent = 0.0
    for d in range(len(price)):
        spent += price[d] * max(s.free[slot, d], front)
    for r in range(min(s.ready_count[slot], MOST_READY)):
        v = s.ready[slot, r]
        pinned = s.pinned[slot, o.group[v]] if o.group[v] >= 0 else -1
        for d in range(len(price)):
            free = s.free[slot, d]
            if not o.allowed[v, d] or (pinned != d if pinned >= 0 else free > latest):
                continue
            data = _arrival(o, s, slot, v, d)
            begin = max(free, data)
            new_front = max(front, begin if eager else free)
            new = s.spent[slot] + spending[v]
            if data < s.waited[slot, d]:
                new += OUT_OF_ORDER * price[d] * (s.waited[slot, d] - data)
            value = new + spent - price[d] * max(free, front)
            value += price[d] * max(begin + o.cost[v, d], new_front)
            if new_front > front:
                for other in range(len(price)):
                    if other != d:
                        until = s.free[slot, other]
                        value += price[other] * (max(until, new_front) - max(until, front))
            key = s.key[slot] ^ keys[v, d]
            if choices < len(s.value) or value < s.value[choices - 1]:
                choices = _add_choice(s, choices, value, slot, v, d, begin, new, key)
    return int64(choices)


@compiled_inline
def _latest_free(s: _States, slot: int, front: float, ahead: int) -> float:
    """Return when the last of the devices is free that are considered."""
    latest = front
    for _ in range(ahead):
        following = np.inf
        for d in range(s.free.shape[1]):
            if s.free[slot, d] > latest:
                following = min(following, s.free[slot, d])
        if following == np.inf:
            break
        latest = following
    return latest


@compiled_inline
def _arrival(o: SchedulingArrays, s: _States, slot: int, v: int, d: int) -> float:
    """Return when all inputs of op v are on device d."""
    data = 0.0
    for e in range(o.predecessor_start[v], o.predecessor_start[v + 1]):
        p = o.predecessors[e]
        home = s.devices[slot, p]
        arrival = s.finish[slot, p]
        if home != d:
            arrival += o.latency[home, d] + o.edge_bytes[e] * o.ns_per_byte[home, d]
        data = max(data, arrival)
    return data


@compiled_inline
def _add_choice(
    s: _States,
    choices: int,
    value: float,
    slot: int,
    v: int,
    d: int,
    begin: float,
    spent: float,
    key: int,
) -> int:
    """Insert a choice by its value; of those with equal placements keep the cheapest."""
    at = choices
    for k in range(choices):
        if s.new_key[k] == key:
            if s.value[k] <= value:
                return choices
            at = k
    if at == choices:
        choices = min(choices + 1, len(s.value))
        at = choices - 1
    while at > 0 and s.value[at - 1] > value:
        s.value[at] = s.value[at - 1]
        s.parent[at] = s.parent[at - 1]
        s.op[at] = s.op[at - 1]
        s.device[at] = s.device[at - 1]
        s.begin[at] = s.begin[at - 1]
        s.new_spent[at] = s.new_spent[at - 1]
        s.new_key[at] = s.new_key[at - 1]
        at -= 1
    s.value[at] = value
    s.parent[at] = slot
    s.op[at] = v
    s.device[at] = d
    s.begin[at] = begin
    s.new_spent[at] = spent
    s.new_key[at] = key
    return choices


@compiled_inline
def _spare(s: _States, first: int, choices: int) -> int:
    """Return a schedule from ``first`` on that no choice goes on from."""
    for slot in range(first, len(s.live)):
        used = False
        for k in range(choices):
            used |= s.parent[k] == slot
        if not used:
            return int64(slot)
    return int64(-1)  # never: there are as many schedules as choices


@compiled_inline
def _copy(s: _States, source: int, target: int) -> None:
    for v in range(s.devices.shape[1]):
        s.devices[target, v] = s.devices[source, v]
        s.finish[target, v] = s.finish[source, v]
        s.waiting[target, v] = s.waiting[source, v]
    for r in range(s.ready_count[source]):
        s.ready[target, r] = s.ready[source, r]
    s.ready_count[target] = s.ready_count[source]
    for g in range(s.pinned.shape[1]):
        s.pinned[target, g] = s.pinned[source, g]
    for d in range(s.free.shape[1]):
        s.free[target, d] = s.free[source, d]
        s.waited[target, d] = s.waited[source, d]
    s.front[target] = s.front[source]


@compiled_inline
def _place(o: SchedulingArrays, s: _States, slot: int, k: int, rank: Longs, eager: bool) -> None:
    """Make choice k in a schedule."""
    v, d, begin = s.op[k], s.device[k], s.begin[k]
    free = s.free[slot, d]
    s.front[slot] = max(s.front[slot], begin if eager else free)
    if begin > free:
        s.waited[slot, d] = begin
    s.free[slot, d] = begin + o.cost[v, d]
    s.finish[slot, v] = s.free[slot, d]
    s.devices[slot, v] = d
    if o.group[v] >= 0:
        s.pinned[slot, o.group[v]] = d
    s.spent[slot] = s.new_spent[k]
    s.key[slot] = s.new_key[k]
    kept = 0
    for r in range(s.ready_count[slot]):
        if s.ready[slot, r] != v:
            s.ready[slot, kept] = s.ready[slot, r]
            kept += 1
    s.ready_count[slot] = kept
    for e in range(o.successor_start[v], o.successor_start[v + 1]):
        w = o.successors[e]
        s.waiting[slot, w] -= 1
        if s.waiting[slot, w] == 0:
            _add_ready(s, slot, w, rank)
