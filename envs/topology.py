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
    _check_joined(problem, devices)
    nested = nested_blocks(problem, devices)
    return tuple(_level(problem, inner, outer) for inner, outer in pairwise(nested))


def nested_blocks(problem: Problem, devices: Sequence[int]) -> list[list[Block]]:
    """Blocks of the devices, level by level: first every device alone, last all that are joined."""
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
    """Seconds between devices, (G, G), the longer of both ways; 0 on the diagonal."""
    own = np.ix_(devices, devices)
    far_s = problem.latency_s[own] + NOMINAL_BYTES / problem.bandwidth_bytes_per_s[own]
    # Devices between which nothing takes any time are still apart.
    far_s = np.maximum(far_s, np.finfo(np.float64).tiny)
    far_s[~problem.connected[own]] = np.inf
    far_s = np.maximum(far_s, far_s.T)
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
    """The number of the block of every device, (G,)."""
    number = {d: i for i, block in enumerate(blocks) for d in block}
    return np.array([number[d] for d in devices])


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
