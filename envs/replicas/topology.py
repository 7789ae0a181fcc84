"""Levels of a network (node, rack, cluster), derived from the links of a cluster.

The distance between two devices is the time that :data:`NOMINAL_BYTES` take between them. The
devices nearest to each other form a block, the nearest of these blocks form a larger one, and so
on; every step at which all blocks have equal size is a level. So nodes need no names: devices with
faster links among them form a node, and without such links all devices are peers. A level is as
slow as the slowest link across it.

What the devices of a block share follows from the queues of their links. Let each device of every
block send to its peer in the next block at once: the number of streams through the busiest queue
determines the share of each. This covers one network card per node (``Link.ports``), one per
device, half duplex, and a bus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.collectives import Level
from envs.problem import NO_QUEUE, Problem

NOMINAL_BYTES: Final = 25 << 20
"""Size of a bucket of gradients."""
Block: TypeAlias = tuple[int, ...]
"""Device indices."""


def levels_of(problem: Problem, devices: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels of the network of some devices, innermost first; () for a single device.

    Raises:
        ValueError: two of the devices have no link; says which, and what to do.
    """
    _check_joined(problem, devices)
    nested = nested_blocks(problem, devices)
    return tuple(_level(problem, inner, outer) for inner, outer in pairwise(nested))


def nested_blocks(problem: Problem, devices: Sequence[int]) -> list[list[Block]]:
    """Return blocks of the devices by level: first each device alone, last all that are linked."""
    far_s = _far_s(problem, devices)
    nested: list[list[Block]] = [[(d,) for d in devices]]
    for limit_s in np.unique(far_s[(far_s > 0) & (far_s < np.inf)]):
        blocks = _components(devices, far_s <= limit_s)
        are_even = len({len(block) for block in blocks}) == 1
        if are_even and len(blocks) < len(nested[-1]):
            nested.append(blocks)
    return nested


def _check_joined(problem: Problem, devices: Sequence[int]) -> None:
    apart = np.argwhere(~problem.connected[np.ix_(devices, devices)])
    if len(apart):
        source, destination = (problem.cluster.names[devices[i]] for i in apart[0].tolist())
        raise ValueError(
            f"gradients cannot be reduced over {source} and {destination}: no link of cluster "
            f"{problem.cluster.name!r} joins them. List one that costs as much as the way they take"
        )


def _far_s(problem: Problem, devices: Sequence[int]) -> NDArray[np.float64]:
    # Seconds between devices, (G, G), the slower direction; 0 on the diagonal.
    own = np.ix_(devices, devices)
    far_s = problem.latency_s[own] + NOMINAL_BYTES / problem.bandwidth_bytes_per_s[own]
    # distinct devices stay apart even if transfers between them take no time
    far_s = np.maximum(far_s, np.finfo(np.float64).tiny)
    far_s[~problem.connected[own]] = np.inf
    far_s = np.maximum(far_s, far_s.T)
    np.fill_diagonal(far_s, 0.0)
    return far_s


def _components(devices: Sequence[int], near: NDArray[np.bool_]) -> list[Block]:
    # Connected components.
    left = np.ones(len(devices), np.bool_)
    blocks = []
    while left.any():
        inside = np.zeros(len(devices), np.bool_)
        found = np.arange(len(devices)) == np.argmax(left)
        while (found & ~inside).any():
            inside |= found
            found = near[inside].any(axis=0)
        blocks.append(tuple(devices[i] for i in np.flatnonzero(inside).tolist()))
        left &= ~inside
    return blocks


def _level(problem: Problem, inner: Sequence[Block], outer: Sequence[Block]) -> Level:
    # The level that joins inner blocks to outer blocks.
    of = {d: i for i, whole in enumerate(outer) for d in whole}
    rings: list[list[Block]] = [[] for _ in outer]
    for block in inner:
        rings[of[block[0]]].append(block)
    lone = _most_streams(problem, ((ring, 1) for ring in rings))
    every = _most_streams(problem, ((ring, len(inner[0])) for ring in rings))
    devices = [d for block in inner for d in block]
    across = _numbers(inner, devices) != _numbers(inner, devices)[:, None]
    across &= _numbers(outer, devices) == _numbers(outer, devices)[:, None]
    own = np.ix_(devices, devices)
    return Level(
        ranks=len(rings[0]),
        latency_s=float(problem.latency_s[own][across].max()),
        bandwidth_bytes_per_s=float(problem.bandwidth_bytes_per_s[own][across].min()) / lone,
        ports=max(len(inner[0]) * lone // every, 1),
    )


def _numbers(blocks: Sequence[Block], devices: Sequence[int]) -> NDArray[np.int64]:
    # Index of each device's block, (G,).
    number = {d: i for i, block in enumerate(blocks) for d in block}
    return np.array([number[d] for d in devices])


def _most_streams(problem: Problem, rings: Iterable[tuple[Sequence[Block], int]]) -> int:
    # Streams through the busiest queue if that many devices of each block send at once.
    passed: Counter[int] = Counter()
    for ring, senders in rings:
        for block, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            for source, destination in zip(block[:senders], following[:senders], strict=True):
                for queue in (problem.queue, problem.second_queue):
                    passed[int(queue[source, destination])] += 1
    del passed[NO_QUEUE]
    return max(passed.values(), default=1)
