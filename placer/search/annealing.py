"""Simulated annealing of devices and op order, guided by the critical chain.

A move changes the rank of an op, or the device of an op (with its co-location group), of a
connected cluster, or of two ops that swap. The op is mostly taken from the critical chain of the
current placement: the ops that decided when the last one ended. Where links are busy, the chain is
mostly delayed by other transfers queued before its own: with ``senders``, ops that send from the
same device are moved, too. The acceptance threshold is drawn before the simulation, so that the
simulation can be aborted as soon as it exceeds the threshold.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing, compiled_inline, int64
from envs.compiled_tables import by_pointer
from envs.simulator import (
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    ProblemArrays,
    Workspace,
    simulate_core,
)
from placer.search.candidate import Candidate, Kind
from placer.search.judge import Judge
from placer.search.outline import Outline
from placer.search.randomness import below, exponential, seeded, uniform

HOT: Final = 1e-3
COLD: Final = 1e-5
"""Relative temperature at the start (HOT) and at the end (COLD), geometric in between."""
ON_CHAIN: Final = 0.9
RANK_MOVES: Final = 0.2
EARLIER: Final = 0.7
MEAN_SHIFT: Final = 12.0
SWAPS: Final = 0.1
CLUSTERS: Final = 0.3
SPREADING: Final = 0.7
MEAN_CLUSTER: Final = 6.0
TO_NEIGHBOUR: Final = 0.6
DRAWS: Final = 20

CURRENT: Final = 0
BEST: Final = 1
CHAIN: Final = 2
LOG: Final = 3
_COUNTERS: Final = 4


@by_pointer
class Walk(NamedTuple):
    """State of a run, and scratch space; N ops."""

    devices: NDArray[np.int32]
    priority: NDArray[np.float64]  # N - rank
    order: NDArray[np.int32]  # ops by rank
    rank: NDArray[np.int32]
    best_devices: NDArray[np.int32]
    best_priority: NDArray[np.float64]
    group_start: NDArray[np.int32]  # (C + 1,) members of co-location groups
    members: NDArray[np.int32]
    group: NDArray[np.int32]  # (N,)
    chain: NDArray[np.int32]  # the first counters[CHAIN] entries are the critical chain
    log_op: NDArray[np.int32]  # the first counters[LOG] entries are the moved ops
    log_device: NDArray[np.int32]  # their previous devices
    counters: NDArray[np.int64]
    random: NDArray[np.uint64]  # (1,)


class Annealing:
    """One annealing run, possibly in pieces; its best placement is never worse than the start.

    The result depends only on start, seed and schedule, not on how the run is cut into pieces.
    """

    def __init__(
        self,
        judge: Judge,
        start: Candidate,
        seed: int,
        *,
        hot: float = HOT,
        senders: float = 0.0,
    ) -> None:
        """Start from a placement that respects the allowed devices of every op.

        ``hot`` is the initial relative temperature. ``senders`` is the share of the moves on the
        critical chain that go to other ops that send from the same device instead.
        """
        count = len(start.devices)
        order = np.lexsort((np.arange(count), -start.priority)).astype(np.int32)
        rank = np.empty(count, np.int32)
        rank[order] = np.arange(count, dtype=np.int32)
        priority = (count - rank).astype(np.float64)
        group = judge.outline.group
        grouped = np.flatnonzero(group >= 0).astype(np.int32)
        sizes = np.bincount(group[grouped], minlength=0)
        self._judge = judge
        self._hot = float(hot)
        self._senders = float(senders)
        self._walk = Walk(
            devices=np.array(start.devices, np.int32),
            priority=priority,
            order=order,
            rank=rank,
            best_devices=np.array(start.devices, np.int32),
            best_priority=priority.copy(),
            group_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            members=grouped[np.argsort(group[grouped], kind="stable")],
            group=group,
            chain=np.zeros(count, np.int32),
            log_op=np.zeros(2 * count, np.int32),
            log_device=np.zeros(2 * count, np.int32),
            counters=np.zeros(_COUNTERS, np.int64),
            random=seeded(seed),
        )
        cost = int(judge.costs(self._walk.devices[None], priority[None])[0])
        _begin(judge.outline, judge.work, self._walk, cost)

    @property
    def best_cost(self) -> int:
        """Cost of the best placement so far, as defined by :class:`Judge`."""
        return int(self._walk.counters[BEST])

    def run(self, steps: int, *, first: int, stride: int, total: int) -> None:
        """Make ``steps`` moves, with at most one evaluation each.

        Move j happens at ``(first + j * stride) / total`` of the temperature schedule.
        """
        _anneal(
            self._judge.outline,
            self._judge.arrays,
            self._judge.work,
            self._walk,
            int(steps),
            int(first),
            int(stride),
            int(total),
            self._judge.memory,
            self._hot,
            self._senders,
        )

    def best(self) -> Candidate:
        """Return the best placement so far."""
        walk, kind = self._walk, Kind.ANNEALING
        return self._judge.candidate(kind, walk.best_devices, walk.best_priority, self.best_cost)


@compiled_borrowing
def _begin(o: Outline, work: Workspace, walk: Walk, cost: int) -> None:
    walk.counters[CURRENT] = cost
    walk.counters[BEST] = cost
    if cost != INFEASIBLE_NS:
        _follow_chain(o, work, walk)


@compiled_borrowing
def _anneal(
    o: Outline,
    arrays: ProblemArrays,
    work: Workspace,
    walk: Walk,
    steps: int,
    first: int,
    stride: int,
    total: int,
    memory: int,
    hot: float,
    senders: float,
) -> None:
    count = len(walk.devices)
    device_count = len(arrays.memory_bytes)
    random = walk.random
    counters = walk.counters
    for step in range(steps):
        progress = min((first + step * stride) / total, 1.0)
        temperature = hot * (COLD / hot) ** progress
        op = below(random, count)
        if counters[CHAIN] > 0 and uniform(random) < ON_CHAIN:
            op = int64(walk.chain[below(random, counters[CHAIN])])
            if senders > 0.0 and uniform(random) < senders:
                op = _sender_beside(o, walk, op)
        counters[LOG] = 0
        old_rank = int64(walk.rank[op])
        if device_count == 1 or uniform(random) < RANK_MOVES:
            shift = 1 + int(min(exponential(random, MEAN_SHIFT), count))
            if uniform(random) < EARLIER:
                shift = -shift
            _shift(walk, op, min(max(old_rank + shift, 0), count - 1))
            if walk.rank[op] == old_rank:
                continue
        else:
            _change_devices(o, walk, op, device_count)
            if counters[LOG] == 0:
                continue

        current = counters[CURRENT]
        limit = NO_LIMIT_NS
        if current != INFEASIBLE_NS:
            limit = current + int(current * exponential(random, temperature))
        cost = simulate_core(arrays, work, walk.devices, walk.priority, limit, memory)
        if cost <= limit:
            counters[CURRENT] = cost
            if cost != INFEASIBLE_NS:
                _follow_chain(o, work, walk)
            if cost < counters[BEST]:
                counters[BEST] = cost
                for i in range(count):
                    walk.best_devices[i] = walk.devices[i]
                    walk.best_priority[i] = walk.priority[i]
        else:
            for k in range(counters[LOG] - 1, -1, -1):
                walk.devices[walk.log_op[k]] = walk.log_device[k]
            if walk.rank[op] != old_rank:
                _shift(walk, op, old_rank)


@compiled_inline
def _follow_chain(o: Outline, work: Workspace, walk: Walk) -> None:
    """Store the critical chain of the schedule just simulated."""
    last = 0
    latest = -1.0
    for i in range(len(walk.devices)):
        end = work.start_ns[i] + o.cost[i, walk.devices[i]]
        if end > latest:
            latest = end
            last = i
    length = 0
    while last >= 0:
        walk.chain[length] = last
        length += 1
        last = work.cause[last]
    walk.counters[CHAIN] = length


@compiled_inline
def _sender_beside(o: Outline, walk: Walk, op: int) -> int:
    """Return another op on this device that sends to a different one; op if none is drawn."""
    home = walk.devices[op]
    for _ in range(DRAWS):
        other = below(walk.random, len(walk.devices))
        if walk.devices[other] == home:
            for k in range(o.successor_start[other], o.successor_start[other + 1]):
                if walk.devices[o.successors[k]] != home:
                    return int(other)
    return op


@compiled_inline
def _shift(walk: Walk, op: int, target: int) -> None:
    """Give op the rank ``target`` and shift the ops in between by one."""
    count = len(walk.order)
    at = walk.rank[op]
    step = 1 if target > at else -1
    while at != target:
        other = walk.order[at + step]
        walk.order[at] = other
        walk.rank[other] = at
        walk.priority[other] = count - at
        at += step
    walk.order[at] = op
    walk.rank[op] = at
    walk.priority[op] = count - at


@compiled_inline
def _change_devices(o: Outline, walk: Walk, op: int, device_count: int) -> None:
    random = walk.random
    home = int64(walk.devices[op])
    kind = uniform(random)
    if kind < SWAPS:
        other = below(random, len(walk.devices))
        there = int64(walk.devices[other])
        apart = walk.group[op] < 0 or walk.group[op] != walk.group[other]
        if there != home and apart and o.allowed[op, there] and o.allowed[other, home]:
            _move(walk, op, there)
            _move(walk, other, home)
        return
    target = below(random, device_count)
    if uniform(random) < TO_NEIGHBOUR:
        neighbour = _neighbour(o, op, below(random, max(_degree(o, op), 1)))
        if neighbour >= 0:
            target = int64(walk.devices[neighbour])
    if target == home:
        target = (home + 1 + below(random, device_count - 1)) % device_count
    if not o.allowed[op, target]:
        return
    _move(walk, op, target)
    if kind < SWAPS + CLUSTERS:
        _move_cluster(o, walk, home, target)


@compiled_inline
def _move_cluster(o: Outline, walk: Walk, home: int, target: int) -> None:
    """Move neighbours on ``home`` along with the moved ops, breadth first."""
    random = walk.random
    size = 2 + int(min(exponential(random, MEAN_CLUSTER), len(walk.devices)))
    follower = 0
    while follower < walk.counters[LOG] and walk.counters[LOG] < size:
        op = int64(walk.log_op[follower])
        follower += 1
        for k in range(_degree(o, op)):
            other = _neighbour(o, op, k)
            if (
                walk.devices[other] == home
                and o.allowed[other, target]
                and uniform(random) < SPREADING
            ):
                _move(walk, other, target)
                if walk.counters[LOG] >= size:
                    return


@compiled_inline
def _move(walk: Walk, op: int, target: int) -> None:
    group = walk.group[op]
    first, end = 0, 1
    if group >= 0:
        first, end = walk.group_start[group], walk.group_start[group + 1]
    for k in range(first, end):
        member = walk.members[k] if group >= 0 else op
        at = walk.counters[LOG]
        walk.log_op[at] = member
        walk.log_device[at] = walk.devices[member]
        walk.counters[LOG] = at + 1
        walk.devices[member] = target


@compiled_inline
def _degree(o: Outline, op: int) -> int:
    inputs = o.predecessor_start[op + 1] - o.predecessor_start[op]
    return int(inputs + o.successor_start[op + 1] - o.successor_start[op])


@compiled_inline
def _neighbour(o: Outline, op: int, k: int) -> int:
    """Return neighbour k of an op, inputs first, or -1 if there is none."""
    inputs = o.predecessor_start[op + 1] - o.predecessor_start[op]
    if k < inputs:
        return int(o.predecessors[o.predecessor_start[op] + k])
    k += o.successor_start[op] - inputs
    return int(o.successors[k]) if k < o.successor_start[op + 1] else -1
