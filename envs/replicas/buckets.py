"""Gradient buckets, and when each of them is reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.replication import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buckets:
    """B buckets; those of one slot are in the order of their reductions."""

    slot: NDArray[np.int32]  # (B,) device, within a replica, that holds the gradients
    size_bytes: NDArray[np.int64]  # (B,)
    ready_ns: NDArray[np.int64]  # (B,) when the last gradient in it is complete

    def __len__(self) -> int:
        return len(self.slot)


def buckets_of(
    slot: NDArray[np.int32],
    size_bytes: NDArray[np.int64],
    ready_ns: NDArray[np.int64],
    *,
    cap_bytes: int = BUCKET_BYTES,
) -> Buckets:
    """Pack gradients (P,) into buckets of at most ``cap_bytes``, in order, slot by slot.

    A larger gradient has a bucket of its own; gradients are not split.
    """
    filling: dict[int, int] = {}  # open bucket by slot
    slots: list[int] = []
    sizes: list[int] = []
    ready: list[int] = []
    rows = zip(slot.tolist(), size_bytes.tolist(), ready_ns.tolist(), strict=True)
    for own_slot, size, own_ready in rows:
        b = filling.get(own_slot)
        if b is None or sizes[b] + size > cap_bytes:
            filling[own_slot] = b = len(slots)
            slots.append(own_slot)
            sizes.append(0)
            ready.append(0)
        sizes[b] += size
        ready[b] = max(ready[b], own_ready)
    return Buckets(
        slot=np.array(slots, np.int32),
        size_bytes=np.array(sizes, np.int64),
        ready_ns=np.array(ready, np.int64),
    )


def reduced_ns(
    buckets: Buckets, duration_ns: NDArray[np.int64], queues: Sequence[Set[int]]
) -> NDArray[np.int64]:
    """Return when the reduction of every bucket ends, (B,).

    Every slot has one stream, which reduces its buckets in order. A reduction occupies the queues
    of its slot (``queues[slot]``, such as network cards) from start to end, so slots that share a
    queue reduce one at a time. The reduction that can start first goes next; ties go to the bucket
    that was ready first, then to the lower slot.

    Args:
        buckets: the buckets of all slots.
        duration_ns: (B,) duration of each reduction.
        queues: queues of every slot.
    """
    waiting: dict[int, list[int]] = {}
    for b, slot in enumerate(buckets.slot.tolist()):
        waiting.setdefault(slot, []).append(b)
    for own in waiting.values():
        own.reverse()
    end_ns = np.zeros(len(buckets), np.int64)
    slot_free = dict.fromkeys(waiting, 0)
    queue_free = {queue: 0 for slot in waiting for queue in queues[slot]}
    ready = buckets.ready_ns.tolist()
    while waiting:
        start, _, slot = min(
            (
                max(ready[own[-1]], slot_free[k], *(queue_free[q] for q in queues[k])),
                ready[own[-1]],
                k,
            )
            for k, own in waiting.items()
        )
        b = waiting[slot].pop()
        end = start + int(duration_ns[b])
        end_ns[b] = slot_free[slot] = end
        queue_free |= dict.fromkeys(queues[slot], end)
        if not waiting[slot]:
            del waiting[slot]
    return end_ns


def serial_ns(buckets: Buckets, duration_ns: NDArray[np.int64], queues: Sequence[Set[int]]) -> int:
    """Return the longest serial time of all reductions of slots joined by shared queues."""
    spent_ns = np.bincount(buckets.slot, duration_ns, minlength=len(queues)).astype(np.int64)
    parts: list[tuple[set[int], int]] = []  # queues, and the time that all their slots take
    for slot in np.unique(buckets.slot).tolist():
        own = set(queues[slot])
        joined = [part for part in parts if part[0] & own]
        parts = [part for part in parts if not part[0] & own]
        own_ns = int(spent_ns[slot]) + sum(ns for _, ns in joined)
        parts.append((own.union(*(others for others, _ in joined)), own_ns))
    return max((ns for _, ns in parts), default=0)


def busiest_ns(buckets: Buckets, duration_ns: NDArray[np.int64], queues: Sequence[Set[int]]) -> int:
    """Return the longest time that one stream or one queue is occupied: no schedule is faster."""
    spent_ns = np.bincount(buckets.slot, duration_ns, minlength=len(queues)).tolist()
    by_queue: Counter[int] = Counter()
    for own, ns in zip(queues, spent_ns, strict=True):
        for queue in own:
            by_queue[queue] += round(ns)
    return max([*by_queue.values(), *map(round, spent_ns)], default=0)
