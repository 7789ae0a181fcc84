"""The step of R replicas of a placement, whose gradients are reduced over all of them.

Every replica runs the placement on devices of its own; slot k is the k-th device of each. The
devices of a slot reduce its gradients, bucket by bucket, during the backward pass. The optimizer
runs after the reductions, even where a device would have had time for updates before: all updates
of a slot come after the pass and after its last bucket,

    T = max(step alone, max over slots k of end of last bucket + updates).

The model ignores contention between reductions and transfers within a replica, and between
reductions and ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.collectives import AllReduce
from envs.problem import nanoseconds
from envs.replicas.step import ReplicaStep
from envs.replicas.topology import SlotNetwork
from envs.replication import BUCKET_BYTES, Replication

LONGEST_NS: Final = 1 << 53
"""Limit on the duration of a reduction, 104 days, so that sums stay within 63 bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicatedStep:
    """A step of several replicas; ``alone_s`` is the step of a single one.

    ``communication_s`` is the largest sum of reductions that share queues. Its part ``exposed_s``
    makes the step longer, ``hidden_s`` does not. The step is at most ``no_overlap_s`` and at least
    ``full_overlap_s``.
    """

    alone_s: float
    step_s: float
    communication_s: float
    full_overlap_s: float
    reductions: tuple[tuple[int, AllReduce], ...]  # (bytes, all-reduce) of each bucket
    buckets: Buckets
    end_ns: NDArray[np.int64]  # (B,) end of each reduction within the step

    @property
    def exposed_s(self) -> float:
        """Time by which the step is longer than that of one replica."""
        return self.step_s - self.alone_s

    @property
    def hidden_s(self) -> float:
        """Communication that overlaps with the step."""
        return max(0.0, round(self.communication_s - self.exposed_s, 12))

    @property
    def no_overlap_s(self) -> float:
        """Step time if reductions started after everything else."""
        return self.alone_s + self.communication_s


def replicated(
    step: ReplicaStep,
    networks: Sequence[SlotNetwork],
    replication: Replication | None = None,
) -> ReplicatedStep:
    """Compute the step of all replicas from the step of one and the networks of its slots.

    The number of replicas is that of the networks, not the one in ``replication``.
    """
    how = replication or Replication()
    before_ns = (how.accumulate - 1) * step.pass_ns
    slots, sizes, ready = step.slot, step.size_bytes, step.ready_ns + before_ns
    cap_bytes = how.bucket_bytes
    if how.average_every > 1:  # the parameters of a slot are one bucket
        sizes = np.zeros(len(networks), np.int64)
        np.add.at(sizes, step.slot, step.size_bytes)
        slots = np.flatnonzero(sizes).astype(np.int32)
        sizes, ready = sizes[slots], np.zeros(len(slots), np.int64)
        cap_bytes = int(np.iinfo(np.int64).max)
    joined = np.array([bool(network.levels) for network in networks], np.bool_)[slots]
    buckets = buckets_of(slots[joined], sizes[joined], ready[joined], cap_bytes=cap_bytes)
    cost = cache(how.all_reduce)
    reductions = tuple(
        (size, cost(size, networks[slot].levels, networks[slot].measured))
        for slot, size in zip(buckets.slot.tolist(), buckets.size_bytes.tolist(), strict=True)
    )
    duration_ns = np.array(
        [nanoseconds(reduction.seconds, LONGEST_NS) for _, reduction in reductions], np.int64
    )
    queues = [network.queues for network in networks]
    end_ns = reduced_ns(buckets, duration_ns, queues)
    alone_ns = before_ns + step.step_ns
    if how.average_every > 1:
        exposed = int(end_ns.max(initial=0)) / how.average_every
        step_ns, communication_ns, full_ns = alone_ns + exposed, exposed, float(alone_ns)
    else:
        after_ns = end_ns + step.update_ns[buckets.slot]
        step_ns = float(max(alone_ns, int(after_ns.max(initial=0))))
        communication_ns = float(serial_ns(buckets, duration_ns, queues))
        full_ns = float(max(alone_ns, busiest_ns(buckets, duration_ns, queues)))
    return ReplicatedStep(
        alone_s=alone_ns / 1e9,
        step_s=step_ns / 1e9,
        communication_s=communication_ns / 1e9,
        full_overlap_s=full_ns / 1e9,
        reductions=reductions,
        buckets=buckets,
        end_ns=end_ns,
    )


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
    for k, size, at_ns in zip(slot.tolist(), size_bytes.tolist(), ready_ns.tolist(), strict=True):
        b = filling.get(k)
        if b is None or sizes[b] + size > cap_bytes:
            filling[k] = b = len(slots)
            slots.append(k)
            sizes.append(0)
            ready.append(0)
        sizes[b] += size
        ready[b] = max(ready[b], at_ns)
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
    """
    waiting: dict[int, list[int]] = {}
    for b in reversed(range(len(buckets))):
        waiting.setdefault(int(buckets.slot[b]), []).append(b)
    end_ns = np.zeros(len(buckets), np.int64)
    slot_free = dict.fromkeys(waiting, 0)
    queue_free = {queue: 0 for slot in waiting for queue in queues[slot]}
    ready = buckets.ready_ns.tolist()
    while waiting:
        start, _, slot = min(
            (
                max(ready[last[-1]], slot_free[k], *(queue_free[q] for q in queues[k])),
                ready[last[-1]],
                k,
            )
            for k, last in waiting.items()
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
    slot_ns = np.bincount(buckets.slot, duration_ns, minlength=len(queues)).astype(np.int64)
    parts: list[tuple[set[int], int]] = []  # queues, and the time that all their slots take
    for slot in np.unique(buckets.slot).tolist():
        shared = set(queues[slot])
        joined = [part for part in parts if part[0] & shared]
        parts = [part for part in parts if not part[0] & shared]
        total_ns = int(slot_ns[slot]) + sum(ns for _, ns in joined)
        parts.append((shared.union(*(others for others, _ in joined)), total_ns))
    return max((ns for _, ns in parts), default=0)


def busiest_ns(buckets: Buckets, duration_ns: NDArray[np.int64], queues: Sequence[Set[int]]) -> int:
    """Return the longest time that one stream or one queue is occupied: no schedule is faster."""
    slot_ns = np.bincount(buckets.slot, duration_ns, minlength=len(queues)).tolist()
    by_queue: Counter[int] = Counter()
    for shared, ns in zip(queues, slot_ns, strict=True):
        for queue in shared:
            by_queue[queue] += round(ns)
    return max([*by_queue.values(), *map(round, slot_ns)], default=0)
