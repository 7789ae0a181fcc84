"""Analytic costs of all-reduce: p ranks add up their gradients, and each of them gets the sum.

Every formula is an alpha-beta model: a message takes alpha, ``latency_s``, and each of its n bytes
beta, ``1 / bandwidth_bytes_per_s``. Links are full duplex, and adding takes no time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a network: a number of ranks, each with one port to the others.

    A network is a sequence of levels, innermost first: at the second level a rank is a node with
    all that is inside it, which shares the node's port. A node may have several ``ports``, such as
    a network card for each of its devices; one device uses one of them.
    """

    ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float  # of a port, in each direction; may be inf
    ports: int = 1

    def __post_init__(self) -> None:
        for name, count in (("ranks", self.ranks), ("ports", self.ports)):
            if count < 1:
                raise ValueError(f"a level has {count} {name}, below 1")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}, not a time >= 0")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}, not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """One all-reduce and its cost; a hierarchical one has an algorithm for each level."""

    algorithm: str
    seconds: float
    by_level: tuple[str, ...] = ()  # innermost first


@dataclass(frozen=True, slots=True)
class MeasuredAllReduce:
    """All-reduces of a backend between ranks of one machine, as measured.

    ``times`` are (ranks, bytes, seconds), in ascending order; every number of ranks has at least
    two sizes. ``by_level`` are those of hierarchical all-reduces, with the ranks at each level,
    innermost first, in the place of the number of ranks.
    """

    backend: str
    times: tuple[tuple[int, int, float], ...]
    by_level: tuple[tuple[tuple[int, ...], int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError("measured all-reduces need two sizes in ascending order")
        for rows in (self.times, self.by_level):
            counts = Counter(ranks for ranks, _, _ in rows)
            if list(rows) != sorted(rows) or min(counts.values(), default=2) < 2:
                raise ValueError("measured all-reduces need two sizes in ascending order")
            if any(not 0 < time_s < math.inf for *_, time_s in rows):
                raise ValueError("measured all-reduces need times above 0")
            if any(a[:2] == b[:2] for a, b in pairwise(rows)):
                raise ValueError("a size of measured all-reduces is given twice")
        if min(self.times)[0] < 2 or any(min(levels) < 2 for levels, _, _ in self.by_level):
            raise ValueError("measured all-reduces need two or more ranks, at every level")

    def seconds(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of a size over a number of ranks.

        Between two sizes, and beyond the last, times are linear in bytes; below the first they are
        its time. A number of ranks that was not measured takes as long as the next larger one, and
        beyond the largest as much longer as a ring sends more bytes.

        >>> times = ((2, 1000, 1e-3), (2, 2000, 1.5e-3))
        >>> MeasuredAllReduce("gloo", times).seconds(3000, 2)
        0.002
        """
        if ranks < 2:
            return 0.0
        counts = sorted({count for count, _, _ in self.times})
        count = next((count for count in counts if count >= ranks), counts[-1])
        time_s = _between([each[1:] for each in self.times if each[0] == count], size_bytes)
        return time_s * (1 - 1 / ranks) / (1 - 1 / count) if ranks > count else time_s

    def hierarchical_s(self, size_bytes: float, levels: Sequence[Level]) -> float | None:
        """Return the seconds of a hierarchical all-reduce, None if these levels were not measured.

        On a single level it is the all-reduce of the backend.
        """
        ranks = ranks_of(levels)
        if len(ranks) < 2:
            return self.seconds(size_bytes, math.prod(ranks))
        points = [each[1:] for each in self.by_level if each[0] == ranks]
        return _between(points, size_bytes) if points else None


def ranks_of(levels: Sequence[Level]) -> tuple[int, ...]:
    """Return the ranks at each level that has several, innermost first."""
    return tuple(level.ranks for level in levels if level.ranks > 1)


def _between(points: Sequence[tuple[int, float]], size_bytes: float) -> float:
    """Return the seconds of a size by two or more (bytes, seconds) in ascending order."""
    spans = list(pairwise(points))
    (low, low_s), (high, high_s) = next((s for s in spans if s[1][0] >= size_bytes), spans[-1])
    share = max((size_bytes - low) / (high - low), 0.0)
    return low_s + share * (high_s - low_s)


def ring_s(size_bytes: float, level: Level) -> float:
    """Return the seconds of a ring: 2 (p - 1) alpha + 2 (p - 1) / p n beta; bandwidth-optimal.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
    IJHPCA 2005; Patarasuk and Yuan, JPDC 2009.

    >>> ring_s(1.2e9, Level(ranks=4, latency_s=0.0, bandwidth_bytes_per_s=1e9))
    1.8
    """
    p = level.ranks
    return 2 * (p - 1) * (level.latency_s + size_bytes / p / level.bandwidth_bytes_per_s)


def tree_s(size_bytes: float, level: Level) -> float:
    """Return the seconds of a binomial tree, up and down: 2 ceil(log2 p) (alpha + n beta).

    Thakur et al. 2005: a reduce and a broadcast. Few messages, all bytes in each: for small sizes.
    """
    steps = math.ceil(math.log2(level.ranks))
    return 2 * steps * (level.latency_s + size_bytes / level.bandwidth_bytes_per_s)


def halving_doubling_s(size_bytes: float, level: Level) -> float:
    """Return seconds of recursive halving, then doubling: 2 log2 p alpha + 2 (p - 1) / p n beta.

    Thakur et al. 2005 (Rabenseifner's algorithm); Goyal et al., arXiv 1706.02677, section 4.1.
    Ranks beyond a power of two first send all their bytes to a partner and receive the result last:
    2 (alpha + n beta) more.
    """
    power = 1 << (level.ranks.bit_length() - 1)
    byte_s = 1 / level.bandwidth_bytes_per_s
    inner_s = 2 * math.log2(power) * level.latency_s
    inner_s += 2 * (power - 1) / power * size_bytes * byte_s
    if power == level.ranks:
        return inner_s
    return inner_s + 2 * (level.latency_s + size_bytes * byte_s)


def recursive_doubling_s(size_bytes: float, level: Level) -> float:
    """Return the seconds of recursive doubling: log2 p (alpha + n beta), the fewest messages.

    Thakur et al. 2005. Partners exchange all their bytes; ranks beyond a power of two are handled
    as in :func:`halving_doubling_s`.
    """
    steps = level.ranks.bit_length() - 1
    if level.ranks > 1 << steps:
        steps += 2
    return steps * (level.latency_s + size_bytes / level.bandwidth_bytes_per_s)


def double_tree_s(size_bytes: float, level: Level) -> float:
    """Return seconds of two binary trees: 2 (n beta + 2 L alpha + sqrt(8 L n alpha beta)).

    L = ceil(log2 p). Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", Parallel Computing 35 (2009): each half of the bytes goes through its own
    tree in k chunks, in 2 L + 2 k steps of alpha + n / (2 k) beta; k = sqrt(L n beta / (2 alpha))
    is optimal. That is a reduction, and a broadcast costs as much. It has the bytes of a ring and
    the messages of a tree: for many ranks.
    """
    if level.ranks == 1:
        return 0.0
    depth = math.ceil(math.log2(level.ranks))
    sent_s = size_bytes / level.bandwidth_bytes_per_s
    filling_s = math.sqrt(8 * depth * sent_s * level.latency_s)
    return 2 * (sent_s + 2 * depth * level.latency_s + filling_s)


def single_reducer_s(size_bytes: float, level: Level) -> float:
    """Return seconds of one reducer (a parameter server): 2 (p - 1) alpha + (p - 1) n beta.

    Gibiansky, "Bringing HPC techniques to deep learning", 2017. The reducer is rank 0, and all
    bytes of the others pass its one port; results sent back in pieces overlap with data still
    coming in. A reducer that answers only when it has everything takes twice the bytes.

    >>> single_reducer_s(1.2e9, Level(ranks=10, latency_s=0.0, bandwidth_bytes_per_s=1e9))
    10.8
    """
    others = level.ranks - 1
    return others * (2 * level.latency_s + size_bytes / level.bandwidth_bytes_per_s)


def hierarchical(size_bytes: float, levels: Sequence[Level]) -> AllReduce:
    """Return the cost of reduce-scatter up to the outermost level, all-reduce, all-gather back.

    At each level every rank reduces its part of the bytes with its peers, by whichever algorithm is
    the cheapest there: the sum over levels i of the seconds for n / (p_1 ... p_i-1) bytes through
    ports that p_1 ... p_i-1 ranks share. BlueConnect (Cho et al., MLSys 2019); with two levels it
    is Horovod's hierarchical allreduce. Inside the outermost level only rings, and halving-doubling
    of a power of two, leave every rank with an equal part.
    """
    seconds, sharing, chosen = 0.0, 1, []
    outermost = max((i for i, level in enumerate(levels) if level.ranks > 1), default=0)
    for i, level in enumerate(levels):
        names = ["ring"] if level.ranks & (level.ranks - 1) else ["ring", "halving-doubling"]
        shared = replace(level, bandwidth_bytes_per_s=_shared(level, sharing))
        costs_s = {
            name: FLAT[name](size_bytes / sharing, shared)
            for name in (FLAT if i == outermost else names)
        }
        cheapest = min(costs_s, key=costs_s.__getitem__)
        seconds += costs_s[cheapest]
        chosen.append(cheapest)
        sharing *= level.ranks
    return AllReduce(algorithm=HIERARCHICAL, seconds=seconds, by_level=tuple(chosen))


FLAT: Final[Mapping[str, Callable[[float, Level], float]]] = {
    "ring": ring_s,
    "tree": tree_s,
    "double-tree": double_tree_s,
    "halving-doubling": halving_doubling_s,
    "recursive-doubling": recursive_doubling_s,
    "single-reducer": single_reducer_s,
}
"""Algorithms that treat all ranks as peers."""
HIERARCHICAL: Final = "hierarchical"
ALGORITHMS: Final = (*FLAT, HIERARCHICAL)
ALL_SEND: Final = frozenset({"halving-doubling", "recursive-doubling"})
"""Algorithms in which all ranks of a node send to other nodes at once."""
PAYLOADS: Final[Mapping[str, float]] = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "1-bit": 1 / 32}
"""Bytes sent per byte of an fp32 gradient. One-bit payloads (Seide et al., Interspeech 2014) are
exchanged all to all and gathered again, which sends the bytes of a ring; their per-column values
are not counted."""


def all_reduce(algorithm: str, size_bytes: float, levels: Sequence[Level]) -> AllReduce:
    """Return the cost of an all-reduce of ``size_bytes`` over the ranks of one or more levels.

    A flat algorithm on several levels has neighbors in order, so that few ranks of a node send to
    other nodes at a time, and runs at the pace of the slowest level; in those of ``ALL_SEND`` all
    ranks do, and share the ports.
    """
    if algorithm == HIERARCHICAL:
        return hierarchical(size_bytes, levels)
    seconds = FLAT[algorithm](size_bytes, _flattened(algorithm, levels))
    return AllReduce(algorithm=algorithm, seconds=seconds)


def cheapest_all_reduce(size_bytes: float, levels: Sequence[Level]) -> AllReduce:
    """Return the all-reduce of least cost; ties go to the first of ``ALGORITHMS``."""
    costs = (all_reduce(name, size_bytes, levels) for name in ALGORITHMS)
    return min(costs, key=lambda cost: cost.seconds)


def _shared(level: Level, ranks: int) -> float:
    """Return the bytes per second of each of ``ranks`` ranks that use a node's ports at once."""
    return level.bandwidth_bytes_per_s * min(level.ports / ranks, 1.0)


def _flattened(algorithm: str, levels: Sequence[Level]) -> Level:
    """Return all ranks as peers, with the latency and bandwidth of the slowest level they cross."""
    latency_s, bandwidth, inside = 0.0, math.inf, 1
    for level in levels:
        if level.ranks > 1:
            latency_s = max(latency_s, level.latency_s)
            bandwidth = min(bandwidth, _shared(level, inside if algorithm in ALL_SEND else 1))
        inside *= level.ranks
    return Level(ranks=inside, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
