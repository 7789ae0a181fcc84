"""The network of replicas, derived from the links of a cluster: its levels and groups of devices.

The distance between two devices is the time that :data:`NOMINAL_BYTES` take between them. The
devices nearest to each other form a block, the nearest of these blocks form a larger one, and so
on; every step at which all blocks have equal size is a level (node, rack, cluster). So nodes need
no names: devices with faster links among them form a node, and without such links all devices are
peers. A level is as slow as the slowest link across it.

What the devices of a block share follows from the queues of their links. Let each device of every
block send to its peer in the next block at once: the number of streams through the busiest queue
determines the share of each. This covers one network card per node (``Link.ports``), one per
device, half duplex, and a bus.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.collectives import Level, MeasuredAllReduce, ranks_of
from envs.hardware.cluster import Cluster, Device
from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Load, Problem
from graphs.costs import BusyShares

NOMINAL_BYTES: Final = 25 << 20
"""Size of a bucket of gradients."""
UNEVEN_SHARE: Final = 0.1
"""Share by which the memory of devices of one kind may differ for replicas to be on both."""
Block: TypeAlias = tuple[int, ...]
"""Device indices."""


def levels_of(problem: Problem, devices: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels of the network of some devices, innermost first; () for a single device."""
    unlinked = np.argwhere(~problem.connected[np.ix_(devices, devices)])
    if len(unlinked):
        source, destination = (problem.cluster.names[devices[i]] for i in unlinked[0].tolist())
        raise ValueError(
            f"gradients cannot be reduced over {source} and {destination}: no link of cluster "
            f"{problem.cluster.name!r} joins them. Add one that costs as much as their route"
        )
    nested = nested_blocks(problem, devices)
    return tuple(_level(problem, inner, outer) for inner, outer in pairwise(nested))


def nested_blocks(problem: Problem, devices: Sequence[int]) -> list[list[Block]]:
    """Return blocks of the devices by level: first each device alone, last all that are linked."""
    distance_s = _distance_s(problem, devices)
    nested: list[list[Block]] = [[(d,) for d in devices]]
    for limit_s in np.unique(distance_s[(distance_s > 0) & (distance_s < np.inf)]):
        blocks = _components(devices, distance_s <= limit_s)
        are_even = len({len(block) for block in blocks}) == 1
        if are_even and len(blocks) < len(nested[-1]):
            nested.append(blocks)
    return nested


def _distance_s(problem: Problem, devices: Sequence[int]) -> NDArray[np.float64]:
    # Seconds between devices, (G, G), the slower direction; 0 on the diagonal.
    pairs = np.ix_(devices, devices)
    distance_s = problem.latency_s[pairs] + NOMINAL_BYTES / problem.bandwidth_bytes_per_s[pairs]
    # distinct devices stay apart even if transfers between them take no time
    distance_s = np.maximum(distance_s, np.finfo(np.float64).tiny)
    distance_s[~problem.connected[pairs]] = np.inf
    distance_s = np.maximum(distance_s, distance_s.T)
    np.fill_diagonal(distance_s, 0.0)
    return distance_s


def _components(devices: Sequence[int], near: NDArray[np.bool_]) -> list[Block]:
    left = np.ones(len(devices), np.bool_)
    blocks = []
    while left.any():
        inside = np.zeros(len(devices), np.bool_)
        reached = np.arange(len(devices)) == np.argmax(left)
        while (reached & ~inside).any():
            inside |= reached
            reached = near[inside].any(axis=0)
        blocks.append(tuple(devices[i] for i in np.flatnonzero(inside).tolist()))
        left &= ~inside
    return blocks


def _level(problem: Problem, inner: Sequence[Block], outer: Sequence[Block]) -> Level:
    # The level that joins inner blocks to outer blocks.
    outer_of = {d: i for i, block in enumerate(outer) for d in block}
    rings: list[list[Block]] = [[] for _ in outer]
    for block in inner:
        rings[outer_of[block[0]]].append(block)
    one_sends = _most_streams(problem, ((ring, 1) for ring in rings))
    all_send = _most_streams(problem, ((ring, len(inner[0])) for ring in rings))
    devices = [d for block in inner for d in block]
    across = _block_numbers(inner, devices) != _block_numbers(inner, devices)[:, None]
    across &= _block_numbers(outer, devices) == _block_numbers(outer, devices)[:, None]
    pairs = np.ix_(devices, devices)
    slowest = float(problem.bandwidth_bytes_per_s[pairs][across].min())
    return Level(
        ranks=len(rings[0]),
        latency_s=float(problem.latency_s[pairs][across].max()),
        bandwidth_bytes_per_s=slowest / one_sends,
        ports=max(len(inner[0]) * one_sends // all_send, 1),
    )


def _block_numbers(blocks: Sequence[Block], devices: Sequence[int]) -> NDArray[np.int64]:
    number = {d: i for i, block in enumerate(blocks) for d in block}
    return np.array([number[d] for d in devices])


def _most_streams(problem: Problem, rings: Iterable[tuple[Sequence[Block], int]]) -> int:
    # Streams through the busiest queue if that many devices of each block send at once.
    streams: Counter[int] = Counter()
    for ring, senders in rings:
        for block, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            for source, destination in zip(block[:senders], following[:senders], strict=True):
                for queue in (problem.queue, problem.second_queue):
                    streams[int(queue[source, destination])] += 1
    del streams[NO_QUEUE]
    return max(streams.values(), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNetwork:
    """The network between the devices of one slot over all replicas."""

    levels: tuple[Level, ...]  # none for a single replica
    queues: frozenset[int]  # used by transfers between them
    measured: MeasuredAllReduce | None = None  # of the backend that reduces over them

    def repeated(self, factor: int) -> SlotNetwork:
        """Return the network with ``factor`` times as many ranks at the outermost level."""
        *inner, outermost = self.levels
        larger = replace(outermost, ranks=outermost.ranks * factor)
        return replace(self, levels=(*inner, larger))


def slot_networks(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    measured: MeasuredAllReduce | None = None,
) -> tuple[SlotNetwork, ...]:
    """Return the networks of all slots, for replicas on these groups of equal size.

    ``measured`` are the all-reduces of the backend that runs them, where they are known.
    """
    return tuple(_slot_network(problem, devices, measured) for devices in zip(*groups, strict=True))


def ranks_by_level(problem: Problem, groups: Sequence[Block]) -> set[tuple[int, ...]]:
    """Return the ranks at each level of the slots' networks with several; none without links."""
    if not are_linked(problem, groups):
        return set()
    found = {ranks_of(network.levels) for network in slot_networks(problem, groups)}
    return {ranks for ranks in found if len(ranks) > 1}


def _slot_network(
    problem: Problem, devices: Sequence[int], measured: MeasuredAllReduce | None
) -> SlotNetwork:
    pairs = np.ix_(devices, devices)
    queues = {*problem.queue[pairs].ravel().tolist(), *problem.second_queue[pairs].ravel().tolist()}
    return SlotNetwork(
        levels=levels_of(problem, devices),
        queues=frozenset(queues - {NO_QUEUE}),
        measured=measured,
    )


def busy_shares(load: Load | None, groups: Sequence[Sequence[int]]) -> BusyShares:
    """Return the shares of the other devices of a machine that compute beside one of a replica.

    The replicas on these groups compute at the same time, so the devices of the other replicas are
    always busy, and those of the same replica may be. The replica with the most busy devices
    counts, since all wait for the slowest.
    """
    if load is None:
        return BusyShares()
    shares = []
    for machine in sorted({*load.machine.tolist()} - {-1}):
        mates = np.count_nonzero(load.machine == machine) - 1
        used = [np.count_nonzero(load.machine[list(group)] == machine) for group in groups]
        if own := min((count for count in used if count), default=0):
            total = sum(used)
            shares.append(BusyShares(always=(total - own) / mates, at_most=(total - 1) / mates))
    return max(shares, default=BusyShares())


def evened(cluster: Cluster) -> Cluster:
    """Return a cluster in which devices of one kind with nearly equal memory have the least of it.

    Replicas are on devices that are alike, and contexts of CUDA take some memory of only a few.
    """

    def least_bytes(device: Device) -> int:
        kind = [d.memory_bytes for d in cluster.devices if d.kind == device.kind]
        least = min(size for size in kind if size >= (1 - UNEVEN_SHARE) * max(kind))
        return min(device.memory_bytes, least)

    devices = tuple(replace(d, memory_bytes=least_bytes(d)) for d in cluster.devices)
    return replace(cluster, devices=devices)


def replica_groups(problem: Problem, size: int) -> list[list[Block]]:
    """Return disjoint groups of ``size`` devices, by classes of alike groups, largest class first.

    A group lies within a node if the node is large enough, else on as few nodes as needed within
    the smallest larger block, which it shares with no other group. Devices of one kind are grouped
    together; leftover devices are in no group. Groups are alike if devices at equal positions are,
    and the links among them: one placement then serves all.
    """
    count = problem.device_count
    if not 1 <= size <= count:
        raise ValueError(f"a replica on {size} devices: there are 1 .. {count}")
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


def nearest_groups(problem: Problem, groups: Sequence[Block], count: int) -> list[Block]:
    """Return ``count`` of some alike groups that are near each other, in their order.

    They are of the smallest block of groups that has enough, and fill blocks inside it.
    """
    inner: dict[int, tuple[int, ...]] = {}  # of each group: minus size and first of its blocks
    for blocks in _near_blocks(problem, groups):
        enough = [block for block in blocks if len(block) >= count]
        if enough:
            chosen = sorted(enough[0], key=lambda i: (*inner.get(i, ()), i))[:count]
            return [groups[i] for i in sorted(chosen)]
        inner = {i: (-len(block), block[0], *inner.get(i, ())) for block in blocks for i in block}
    return list(groups[:count])


def near_counts(problem: Problem, groups: Sequence[Block]) -> set[int]:
    """Return how many of some alike groups the largest block has, at each level with several."""
    counts = {max(map(len, blocks)) for blocks in _near_blocks(problem, groups)}
    return counts - {1}


def are_linked(problem: Problem, groups: Sequence[Block]) -> bool:
    """Return whether links join the devices of every slot, so that gradients can be reduced."""
    return all(problem.connected[np.ix_(slot, slot)].all() for slot in zip(*groups, strict=True))


def _near_blocks(problem: Problem, groups: Sequence[Block]) -> Iterator[list[Block]]:
    # Blocks of the groups' numbers by distance, the nearest first; slots are apart by the slowest.
    distance_s = np.zeros((len(groups), len(groups)))
    for slot in zip(*groups, strict=True):
        distance_s = np.maximum(distance_s, _distance_s(problem, slot))
    for limit_s in np.unique(distance_s[distance_s < np.inf]):
        yield _components(range(len(groups)), distance_s <= limit_s)


def _smallest_blocks(problem: Problem, size: int) -> list[list[Block]]:
    # The innermost blocks with at least ``size`` devices, each as the list of its sub-blocks.
    devices = tuple(range(problem.device_count))
    nested = [*nested_blocks(problem, devices), [devices]]
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
    return [
        numbers.setdefault(
            (
                device.kind,
                device.memory_bytes,
                problem.cost_ns[:, d].tobytes(),
                problem.allowed[:, d].tobytes(),
            ),
            len(numbers),
        )
        for d, device in enumerate(problem.cluster.devices)
    ]


def _shape(problem: Problem, sorts: Sequence[int], group: Block) -> tuple[object, ...]:
    # Equal for groups that are alike: queues count by order of appearance and by how they serve.
    pairs = np.ix_(group, group)
    by_priority = [*problem.queue_by_priority.tolist(), False]  # the last entry is for NO_QUEUE
    numbers: dict[int, int] = {}
    queues = tuple(
        (numbers.setdefault(queue, len(numbers)), by_priority[queue])
        for table in (problem.queue, problem.second_queue)
        for queue in table[pairs].ravel().tolist()
    )
    links = (problem.latency_s, problem.bandwidth_bytes_per_s, problem.connected)
    return tuple(sorts[d] for d in group), *(table[pairs].tobytes() for table in links), queues
