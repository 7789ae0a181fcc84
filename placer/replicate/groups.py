"""Groups of devices for replicas: how many there are of which size, and on which devices.

For every number of devices d = N // R, R replicas are planned on groups of d devices that are near
each other. All R up to MOST_REPLICAS are tried, then powers of two, the largest, and those that
fill a node, as the curve is smooth in between; where each R needs a search of its own, only the
last two. For a requested R, smaller groups within a node are tried too, and for comparison one
replica per device and one on all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from envs.problem import Problem
from envs.replicas.topology import (
    Block,
    are_linked,
    busy_shares,
    near_counts,
    nearest_groups,
    replica_groups,
)
from envs.replication import Replication, ReplicationError
from graphs.costs import BusyShares

MOST_REPLICAS: Final = 16
Search: TypeAlias = tuple[int, Block, BusyShares]
"""Parts of the batch, the devices of one replica, and what computes beside them."""


@dataclass(frozen=True, slots=True)
class PlannedGroups:
    """Replicas on groups of devices, and the search that places one of them."""

    groups: Sequence[Block]
    search: Search
    is_baseline: bool = False


def planned_groups(problem: Problem, replication: Replication) -> Iterator[PlannedGroups]:
    """Yield the groups to plan replicas on; raise ReplicationError if as many as wanted never are.

    Groups that no link joins are yielded only where there are no others.
    """
    if replication.replicas is not None:
        yield from _requested(problem, replication, replication.replicas)
        return
    for size in _sizes(problem, 1):
        for alike in replica_groups(problem, size):
            for replicas in _counts(problem, replication, alike):
                groups = nearest_groups(problem, alike, replicas)
                yield _planned(problem, replication, groups)


def _requested(
    problem: Problem, replication: Replication, replicas: int
) -> Iterator[PlannedGroups]:
    classes = [
        alike
        for size in _sizes(problem, replicas)
        for alike in replica_groups(problem, size)
        if len(alike) >= replicas
    ]
    if not classes:
        raise ReplicationError(
            f"no {replicas} devices of {problem.cluster.name!r} are alike (kind, memory, costs): "
            "replicas of one placement need groups that are"
        )
    near = {
        n // replicas
        for alike in replica_groups(problem, 1)
        for n in near_counts(problem, alike)
        if replicas > 1  # one has nothing to reduce
    }
    found = [nearest_groups(problem, alike, replicas) for alike in classes]
    linked = [groups for groups in found if are_linked(problem, groups)] or found[:1]
    largest = len(linked[0][0])
    for groups in linked:
        if (size := len(groups[0])) == largest or size in near:
            yield _planned(problem, replication, groups)
    single, whole = replica_groups(problem, 1)[0], replica_groups(problem, problem.device_count)
    if (replicas, largest) != (len(single), 1):
        yield _planned(problem, replication, single, is_baseline=True)
    if largest != problem.device_count:
        yield _planned(problem, replication, whole[0][:1], is_baseline=True)


def _planned(
    problem: Problem,
    replication: Replication,
    groups: Sequence[Block],
    *,
    is_baseline: bool = False,
) -> PlannedGroups:
    parts, busy = replication.parts(len(groups)), busy_shares(problem.load, groups)
    return PlannedGroups(groups, (parts, groups[0], busy), is_baseline)


def _sizes(problem: Problem, least_replicas: int) -> list[int]:
    """Return the sizes of groups of which there may be so many or more, the largest first."""
    count = problem.device_count
    return list(dict.fromkeys(count // r for r in range(least_replicas, count + 1)))


def _counts(problem: Problem, replication: Replication, alike: Sequence[Block]) -> list[int]:
    """Return the numbers of replicas to try; few if each needs a search of its own."""
    most, near = len(alike), near_counts(problem, alike)
    every = range(1, most + 1)
    needs_own = len(alike[0]) > 1 and problem.load is not None
    if needs_own or replication.batch == "global":
        even = [r for r in every if not replication.uneven_parts(replication.parts(r))]
        fills = {max((r for r in even if r <= n), default=most) for n in (*near, most)}
        return sorted({most, *fills})
    return [r for r in every if r <= MOST_REPLICAS or r & (r - 1) == 0 or r in (most, *near)]
