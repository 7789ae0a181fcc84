"""Groups of devices for replicas: of equal size, near each other and alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from envs.replicas.topology import Block, nested_blocks


def replica_groups(problem: Problem, size: int) -> list[list[Block]]:
    """Return disjoint groups of ``size`` devices, by classes of alike groups, largest class first.

    A group lies within a node if the node is large enough, else on as few nodes as needed within
    the smallest larger block (rack, cluster; see :mod:`envs.replicas.topology`), which it shares
    with no other group. Devices of one kind are grouped together; leftover devices are in no group.
    Groups are alike if devices at equal positions are, and the links among them: one
    placement then serves all.

    Raises:
        ValueError: ``size`` is not within 1 .. number of devices.
    """
    count = problem.device_count
    if not 1 <= size <= count:
        raise ValueError(f"a replica on {size} devices: give 1 .. {count}, as many as there are")
    classes: defaultdict[tuple[object, ...], list[Block]] = defaultdict(list)
    sorts = _sorts(problem)
    for nodes in _smallest_blocks(problem, size):
        ordered = sorted(nodes, key=lambda node: (sorts[node[0]], node))
        needed = -(-size // len(nodes[0]))
        for first in range(0, len(nodes) - needed + 1, needed):
            near = [d for node in ordered[first : first + needed] for d in node]
            group = tuple(sorted(sorted(near, key=lambda d: (sorts[d], d))[:size]))
            classes[_shape(problem, sorts, group)].append(group)
    return sorted(classes.values(), key=len, reverse=True)


def _smallest_blocks(problem: Problem, size: int) -> list[list[Block]]:
    # The innermost blocks with at least ``size`` devices, each as the list of its sub-blocks.
    every = tuple(range(problem.device_count))
    nested = [*nested_blocks(problem, every), [every]]
    level = next(i for i, blocks in enumerate(nested) if len(blocks[0]) >= size)
    if level == 0:
        return [[block] for block in nested[0]]
    return [
        [node for node in nested[level - 1] if node[0] in block]
        for block in map(set, nested[level])
    ]


def _sorts(problem: Problem) -> list[int]:
    # Devices of equal kind, memory and op costs share a number, (D,), in order of appearance.
    numbers: dict[tuple[object, ...], int] = {}
    found = []
    for d, device in enumerate(problem.cluster.devices):
        key = (
            device.kind,
            device.memory_bytes,
            problem.cost_ns[:, d].tobytes(),
            problem.allowed[:, d].tobytes(),
        )
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _shape(problem: Problem, sorts: Sequence[int], group: Block) -> tuple[object, ...]:
    # Equal for groups that are alike, different for others.
    own = np.ix_(group, group)
    of_pairs = (problem.latency_s, problem.bandwidth_bytes_per_s, problem.connected)
    return (
        tuple(sorts[d] for d in group),
        *(values[own].tobytes() for values in of_pairs),
        _renumbered(problem, np.stack([problem.queue[own], problem.second_queue[own]])),
    )


def _renumbered(problem: Problem, queues: NDArray[np.int32]) -> tuple[tuple[int, bool], ...]:
    # Queues numbered by first appearance, and whether they serve by priority.
    numbers: dict[int, int] = {}
    by_priority = [*problem.queue_by_priority.tolist(), False]  # the last entry is for NO_QUEUE
    return tuple(
        (numbers.setdefault(queue, len(numbers)), by_priority[queue])
        for queue in queues.ravel().tolist()
    )
