"""The levels of a network (node, rack, cluster), as they follow from the links of a cluster.

Two devices are as far from each other as :data:`NOMINAL_BYTES` take between them. Those nearest to
each other are a block, the nearest of such blocks are one, and so on: every step at which all
blocks are equally large is a level. So nodes need no names: links that are faster inside them make
them, and where there are none, all devices are peers. Of the links across a level the slowest
counts.

What devices of a block share is seen from the queues of their links. Let each device of every block
send to its peer in the next one, all at once: the queue that most of these streams pass tells what
is left for one of them. A network card for a node (``Link.ports``), one for each device, half
duplex and a bus all come out of this.
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
"""A bucket of gradients."""
Block: TypeAlias = tuple[int, ...]
"""Devices by index."""


def levels_of(problem: Problem, devices: Sequence[int]) -> tuple[Level, ...]:
    """The levels of a network of some devices, innermost first; none for a single device.

    Raises:
        ValueError: no link joins two of the devices; says which, and what to do.
    """
    nested = nested_blocks(problem, devices)
    return tuple(_level(problem, inner, outer) for inner, outer in pairwise(nested))


def nested_blocks(problem: Problem, devices: Sequence[int]) -> list[list[Block]]:
    """Blocks of the devices, level by level: first every device alone, last all of them.

    Raises:
        ValueError: no link joins two of the devices; says which, and what to do.
    """
    far_s = _far_s(problem, devices)
    nested: list[list[Block]] = [[(d,) for d in devices]]
    for limit_s in np.unique(far_s[far_s > 0]):
        blocks = _components(devices, far_s <= limit_s)
        are_even = len({len(block) for block in blocks}) == 1
        if are_even and len(blocks) < len(nested[-1]):
            nested.append(blocks)
    return nested


def _far_s(problem: Problem, devices: Sequence[int]) -> NDArray[np.float64]:
    """Seconds between devices, (G, G), the longer of both ways; 0 on the diagonal."""
    own = np.ix_(devices, devices)
    apart = np.argwhere(~problem.connected[own])
    if len(apart):
        source, destination = (problem.cluster.names[devices[i]] for i in apart[0])
        raise ValueError(
            f"gradients cannot be reduced over {source} and {destination}: no link of cluster "
            f"{problem.cluster.name!r} joins them. List one that costs as much as the way they take"
        )
    far_s = problem.latency_s[own] + NOMINAL_BYTES / problem.bandwidth_bytes_per_s[own]
    far_s = np.maximum(far_s, far_s.T)
    # Devices between which nothing takes any time are still apart.
    far_s = np.maximum(far_s, np.finfo(np.float64).tiny)
    np.fill_diagonal(far_s, 0.0)
    return far_s


def _components(devices: Sequence[int], near: NDArray[np.bool_]) -> list[Block]:
    """Devices that are near each other, directly or by others."""
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
    """The level at which inner blocks make up outer ones."""
    rings = [[block for block in inner if set(block) <= set(whole)] for whole in outer]
    own = [np.ix_(a, b) for ring in rings for a in ring for b in ring if a != b]
    lone = _most_streams(problem, ((ring, 1) for ring in rings))
    every = _most_streams(problem, ((ring, len(inner[0])) for ring in rings))
    slowest = min(float(problem.bandwidth_bytes_per_s[pairs].min()) for pairs in own)
    return Level(
        ranks=len(rings[0]),
        latency_s=max(float(problem.latency_s[pairs].max()) for pairs in own),
        bandwidth_bytes_per_s=slowest / lone,
        ports=max(len(inner[0]) * lone // every, 1),
    )


def _most_streams(problem: Problem, rings: Iterable[tuple[Sequence[Block], int]]) -> int:
    """Streams in the queue that most of them pass, if so many devices of a block send at once."""
    passed: Counter[int] = Counter()
    for ring, senders in rings:
        for block, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            for source, destination in zip(block[:senders], following[:senders], strict=True):
                for queue in (problem.queue, problem.second_queue):
                    passed[int(queue[source, destination])] += 1
    del passed[NO_QUEUE]
    return max(passed.values(), default=1)
