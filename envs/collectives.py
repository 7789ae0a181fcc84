"""What a reduction costs on paper: p ranks add up their gradients, and each of them gets the sum.

Every formula is an alpha-beta model: a message takes alpha, ``latency_s``, and each of its n bytes
beta, ``1 / bandwidth_bytes_per_s``. Links are full duplex, and adding takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a network: so many ranks, each with one port to the others.

    A network is a sequence of levels, innermost first: at the second level a rank is a node with
    all that is inside it, and its port is the one that all of them share.
    """

    ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float  # of a port, in each direction; may be inf

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a level has {self.ranks} ranks, below 1")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}, not a time >= 0")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}, not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A reduction by one algorithm."""

    algorithm: str
    seconds: float


def ring_s(size_bytes: float, level: Level) -> float:
    """Seconds of a ring: 2 (p - 1) alpha + 2 (p - 1) / p n beta, the least bytes that suffice.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
    IJHPCA 2005; Patarasuk and Yuan, JPDC 2009.

    >>> ring_s(1.2e9, Level(ranks=4, latency_s=0.0, bandwidth_bytes_per_s=1e9))
    1.8
    """
    p = level.ranks
    return 2 * (p - 1) * (level.latency_s + size_bytes / p / level.bandwidth_bytes_per_s)


def tree_s(size_bytes: float, level: Level) -> float:
    """Seconds of a binomial tree, up and down: 2 ceil(log2 p) (alpha + n beta).

    Thakur et al. 2005: a reduce and a broadcast. Few messages, all bytes in each: for small sizes.
    """
    steps = math.ceil(math.log2(level.ranks))
    return 2 * steps * (level.latency_s + size_bytes / level.bandwidth_bytes_per_s)


def halving_doubling_s(size_bytes: float, level: Level) -> float:
    """Seconds of recursive halving, then doubling: 2 log2 p alpha + 2 (p - 1) / p n beta.

    Thakur et al. 2005 (Rabenseifner's algorithm); Goyal et al., arXiv 1706.02677, section 4.1. The
    ranks beyond a power of two hand all their bytes to a partner first and get them back last:
    2 (alpha + n beta) more.
    """
    power = 1 << (level.ranks.bit_length() - 1)
    byte_s = 1 / level.bandwidth_bytes_per_s
    inner_s = 2 * math.log2(power) * level.latency_s
    inner_s += 2 * (power - 1) / power * size_bytes * byte_s
    if power == level.ranks:
        return inner_s
    return inner_s + 2 * (level.latency_s + size_bytes * byte_s)


def single_reducer_s(size_bytes: float, level: Level) -> float:
    """Seconds of one reducer (a parameter server on rank 0): 2 (p - 1) alpha + (p - 1) n beta.

    Gibiansky, "Bringing HPC techniques to deep learning", 2017. All bytes of all others pass its
    one port; what goes back in pieces overlaps with what still comes in. A reducer that answers
    only when it has everything takes twice the bytes.

    >>> single_reducer_s(1.2e9, Level(ranks=10, latency_s=0.0, bandwidth_bytes_per_s=1e9))
    10.8
    """
    others = level.ranks - 1
    return others * (2 * level.latency_s + size_bytes / level.bandwidth_bytes_per_s)


def hierarchical_s(size_bytes: float, levels: Sequence[Level]) -> float:
    """Seconds of reduce-scatter inwards to outwards, then all-gather back.

    At each level every rank reduces the part of the bytes that it holds with its peers, by ring or
    halving-doubling, whichever is cheaper: sum over levels i of their seconds for n / (p_1 ...
    p_i-1) bytes through a port that p_1 ... p_i-1 ranks share. BlueConnect (Cho et al., MLSys
    2019); with two levels it is Horovod's hierarchical allreduce.
    """
    seconds, sharing = 0.0, 1
    for level in levels:
        own = Level(
            ranks=level.ranks,
            latency_s=level.latency_s,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / sharing,
        )
        part = size_bytes / sharing
        seconds += min(ring_s(part, own), halving_doubling_s(part, own))
        sharing *= level.ranks
    return seconds


FLAT: Final[Mapping[str, Callable[[float, Level], float]]] = {
    "ring": ring_s,
    "tree": tree_s,
    "halving-doubling": halving_doubling_s,
    "single-reducer": single_reducer_s,
}
"""Algorithms that take all ranks as peers."""
HIERARCHICAL: Final = "hierarchical"
ALGORITHMS: Final = (*FLAT, HIERARCHICAL)


def all_reduce_s(
    algorithm: str, size_bytes: float, levels: Sequence[Level], *, payload_factor: float = 1.0
) -> float:
    """Seconds of a reduction of ``size_bytes`` over all ranks of a network.

    Args:
        algorithm: one of ``ALGORITHMS``. A flat one on several levels has neighbours in order, so
            that few ranks of a node talk to other nodes at a time, and goes at the pace of the
            slowest level; halving-doubling, where all do, shares the ports.
        size_bytes: of the gradients of one rank.
        levels: of the network, innermost first.
        payload_factor: bytes sent per byte of gradient: 0.5 for half precision, 1 / 32 for a bit.

    Raises:
        ValueError: there is no such algorithm or no level, or a number is out of range.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"there is no reduction {algorithm!r}: there are {', '.join(ALGORITHMS)}")
    if not levels:
        raise ValueError("a network has at least one level; this one has none")
    if not (math.isfinite(size_bytes) and size_bytes >= 0):
        raise ValueError(f"size_bytes is {size_bytes}, not a size >= 0")
    if not (math.isfinite(payload_factor) and payload_factor > 0):
        raise ValueError(f"payload_factor is {payload_factor}, not a factor above 0")
    sent_bytes = size_bytes * payload_factor
    if algorithm == HIERARCHICAL:
        return hierarchical_s(sent_bytes, levels)
    return FLAT[algorithm](sent_bytes, _flattened(algorithm, levels))


def cheapest_all_reduce(
    size_bytes: float, levels: Sequence[Level], *, payload_factor: float = 1.0
) -> AllReduce:
    """The reduction that takes the least time; of equal ones the first of ``ALGORITHMS``.

    Raises:
        ValueError: as for :func:`all_reduce_s`.
    """
    every = [
        AllReduce(
            algorithm=name,
            seconds=all_reduce_s(name, size_bytes, levels, payload_factor=payload_factor),
        )
        for name in ALGORITHMS
    ]
    return min(every, key=lambda found: found.seconds)


def _flattened(algorithm: str, levels: Sequence[Level]) -> Level:
    """All ranks as peers, with the latency and the bandwidth of the slowest level they cross."""
    latency_s, bandwidth, inside = 0.0, math.inf, 1
    for level in levels:
        sharing = inside if algorithm == "halving-doubling" else 1
        if level.ranks > 1:
            latency_s = max(latency_s, level.latency_s)
            bandwidth = min(bandwidth, level.bandwidth_bytes_per_s / sharing)
        inside *= level.ranks
    return Level(ranks=inside, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
