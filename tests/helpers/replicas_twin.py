"""Specification of the step of replicas in plain Python, instant by instant."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from envs.replicas.step import ReplicaStep


def twin_buckets(step: ReplicaStep, cap_bytes: int) -> list[tuple[int, int, int]]:
    """Return (slot, bytes, ready) of all buckets, slot by slot."""
    found = []
    for slot in sorted(set(step.slot.tolist())):
        own = [p for p in range(len(step.slot)) if step.slot[p] == slot]
        while own:
            count = 1
            while count < len(own) and sum(step.size_bytes[own[: count + 1]]) <= cap_bytes:
                count += 1
            taken, own = own[:count], own[count:]
            size = int(sum(step.size_bytes[taken]))
            found.append((slot, size, int(max(step.ready_ns[taken]))))
    return found


def twin_ends(
    buckets: list[tuple[int, int, int]],
    duration_ns: list[int],
    queues: Sequence[AbstractSet[int]],
) -> list[int]:
    """Return the end of every reduction, checking every instant at which anything changes."""
    end: list[int | None] = [None] * len(buckets)
    instants = {ready for _, _, ready in buckets}
    while None in end:
        now = min(instants)
        instants.discard(now)
        while True:
            busy = {
                key
                for b, (slot, _, _) in enumerate(buckets)
                if (ends := end[b]) is not None and ends > now
                for key in [("slot", slot), *(("queue", q) for q in queues[slot])]
            }
            able = []
            for b, (slot, _, ready) in enumerate(buckets):
                first = all(end[x] is not None for x in range(b) if buckets[x][0] == slot)
                wanted = {("slot", slot), *(("queue", q) for q in queues[slot])}
                if end[b] is None and first and ready <= now and not wanted & busy:
                    able.append((ready, slot, b))
            if not able:
                break
            b = min(able)[2]
            end[b] = now + duration_ns[b]
            instants.add(now + duration_ns[b])
            if duration_ns[b]:
                continue
    return [ends for ends in end if ends is not None]


def twin_step_ns(
    step: ReplicaStep,
    buckets: list[tuple[int, int, int]],
    ends: list[int],
) -> int:
    last = [
        end + int(step.update_ns[slot]) for (slot, _, _), end in zip(buckets, ends, strict=True)
    ]
    return max([step.step_ns, *last])
