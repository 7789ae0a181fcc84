"""States of a sweep, and their transition when one more op is placed."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing, compiled_inline
from envs.compiled_tables import by_pointer
from envs.sweep_plan import SweepPlan

MOST_DEVICES: Final = 16
HOME_SHIFT: Final = MOST_DEVICES
MASK: Final = (1 << HOME_SHIFT) - 1
"""Mask of an output's location: one bit per device that has it; the producing device is above."""
EVERYWHERE: Final = MASK
_PRIME: Final = np.uint64(0x100000001B3)
_SPREAD: Final = np.uint64(29)

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@by_pointer
class States(NamedTuple):
    """Buffers for S states, scratch for one more, and a hash table of 2**k > S entries."""

    where: Ints  # (S + 1, F) location code of each slot, 0 for unused
    load_ns: Longs  # (S + 1, D)
    spent_ns: Longs  # (S + 1,) sum of the loads; merging lowers it less than the loads
    table: Ints  # -1 for empty


def states_for(most: int, slots: int, devices: int) -> States:
    """Allocate states; the first one is the state without any op."""
    return States(
        where=np.zeros((most + 1, slots), np.int32),
        load_ns=np.zeros((most + 1, devices), np.int64),
        spent_ns=np.zeros(most + 1, np.int64),
        table=np.full(1 << (2 * most).bit_length(), -1, np.int32),
    )


@compiled_borrowing
def advance(
    plan: SweepPlan,
    i: int,
    count: int,
    old: States,
    new: States,
    limit_ns: int,
    cell_ns: int,
    free_ns: int,
) -> int:
    """Place op i in all ways within the limit; return the number of new states, -1 if too many.

    States with equal outputs whose loads lie in the same cells are merged. Outputs that are sent in
    less than ``free_ns`` count as being on all devices at once.
    """
    new.table[:] = -1
    size = 0
    for s in range(count):
        for d in range(new.load_ns.shape[1]):
            if not _may_go(plan, i, s, d, old):
                continue
            if size == len(new.spent_ns):
                return -1
            if not _place(plan, i, s, d, old, new, size, limit_ns, free_ns):
                continue
            _order_devices(plan, new, size)
            at = _find(new, size, cell_ns)
            if at == size:
                size += 1
                continue
            for e in range(new.load_ns.shape[1]):
                new.load_ns[at, e] = min(new.load_ns[at, e], new.load_ns[size, e])
            new.spent_ns[at] = min(new.spent_ns[at], new.spent_ns[size])
    return size


@compiled_inline
def _may_go(plan: SweepPlan, i: int, s: int, d: int, old: States) -> bool:
    if plan.cost_ns[i, d] < 0:
        return False
    if plan.group_slot[i] < 0:
        return True
    code = old.where[s, plan.group_slot[i]]
    return bool(code == 0 or code >> HOME_SHIFT == d)


@compiled_inline
def _place(
    plan: SweepPlan,
    i: int,
    s: int,
    d: int,
    old: States,
    new: States,
    at: int,
    limit_ns: int,
    free_ns: int,
) -> bool:
    # Writes state s with op i on device d; returns False if that exceeds the limit.
    for f in range(new.where.shape[1]):
        new.where[at, f] = old.where[s, f]
    for e in range(new.load_ns.shape[1]):
        new.load_ns[at, e] = old.load_ns[s, e]
    new.spent_ns[at] = old.spent_ns[s]
    _add(new, at, d, plan.cost_ns[i, d])
    for k in range(plan.read_start[i], plan.read_start[i + 1]):
        f = plan.read_slot[k]
        code = new.where[at, f]
        if code & (1 << d) == 0:
            send_ns = plan.send_ns[plan.read_op[k]]
            home = code >> HOME_SHIFT
            if plan.pays[home] and code & MASK == 1 << home:
                _add(new, at, home, send_ns)
            if plan.pays[d]:
                _add(new, at, d, send_ns)
            new.where[at, f] |= 1 << d
        if plan.read_last[k]:
            new.where[at, f] = 0
    here = d << HOME_SHIFT | 1 << d
    if plan.group_slot[i] >= 0:
        new.where[at, plan.group_slot[i]] = 0 if plan.group_last[i] else here
    if plan.own_slot[i] >= 0:
        new.where[at, plan.own_slot[i]] = here if plan.send_ns[i] >= free_ns else EVERYWHERE
    most = 0
    for e in range(new.load_ns.shape[1]):
        most = max(most, new.load_ns[at, e])
    room_ns = new.load_ns.shape[1] * limit_ns
    return bool(most <= limit_ns and new.spent_ns[at] + plan.rest_ns[i + 1] <= room_ns)


@compiled_inline
def _add(new: States, at: int, d: int, ns: int) -> None:
    new.load_ns[at, d] += ns
    new.spent_ns[at] += ns


@compiled_inline
def _order_devices(plan: SweepPlan, new: States, at: int) -> None:
    # Canonical form: sorts neighbouring interchangeable devices by load, the largest first.
    for a in range(1, new.load_ns.shape[1]):
        b = a
        while (
            b > 0
            and plan.alike[b] == plan.alike[b - 1]
            and new.load_ns[at, b] > new.load_ns[at, b - 1]
        ):
            _swap(new, at, b - 1, b)
            b -= 1


@compiled_inline
def _swap(new: States, at: int, c: int, d: int) -> None:
    new.load_ns[at, c], new.load_ns[at, d] = new.load_ns[at, d], new.load_ns[at, c]
    for f in range(new.where.shape[1]):
        code = new.where[at, f]
        if code in (0, EVERYWHERE):
            continue
        home = code >> HOME_SHIFT
        if (code >> c ^ code >> d) & 1:
            code ^= 1 << c | 1 << d
        if home in (c, d):
            code ^= (c ^ d) << HOME_SHIFT
        new.where[at, f] = code


@compiled_inline
def _find(new: States, at: int, cell_ns: int) -> int:
    # Returns the index of a state with equal outputs and load cells, or inserts this one.
    key = np.uint64(0xCBF29CE484222325)
    for f in range(new.where.shape[1]):
        key = (key ^ np.uint64(new.where[at, f])) * _PRIME
    for e in range(new.load_ns.shape[1]):
        key = (key ^ np.uint64(new.load_ns[at, e] // cell_ns)) * _PRIME
        key ^= key >> _SPREAD
    last = len(new.table) - 1
    k = np.int64(key & np.uint64(last))
    while new.table[k] >= 0:
        other = new.table[k]
        if _similar(new, at, other, cell_ns):
            return int(other)
        k = (k + 1) & last
    new.table[k] = at
    return at


@compiled_inline
def _similar(new: States, a: int, b: int, cell_ns: int) -> bool:
    for f in range(new.where.shape[1]):
        if new.where[a, f] != new.where[b, f]:
            return False
    for e in range(new.load_ns.shape[1]):
        if new.load_ns[a, e] // cell_ns != new.load_ns[b, e] // cell_ns:
            return False
    return True
