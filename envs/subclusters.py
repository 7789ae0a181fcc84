"""Sub-clusters of a cluster, up to symmetry: the parts of it that one could rent.

Two devices are alike if exchanging them changes nothing: kind, price, memory, costs of all ops,
where the graph allows them, and links with their queues. Then only their number counts. The same
holds for whole classes of such devices, such as two equal nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations_with_replacement, product
from math import comb, prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.cluster import Cluster, Link
from envs.problem import NO_QUEUE, Problem

Counts: TypeAlias = tuple[int, ...]
"""Number of devices of each class, in descending order among classes that are alike."""
MOST_COMBINATIONS: Final = 20_000
"""Limit on the combinations to enumerate before checking which are connected; takes a second."""


def part_of(cluster: Cluster, devices: Iterable[int]) -> Cluster:
    """Return the sub-cluster of some devices (indices), in cluster order, with their links."""
    kept = [cluster.devices[d] for d in sorted(set(devices))]
    names = {device.name for device in kept}
    links = (_among(link, names) for link in cluster.links)
    return replace(
        cluster, devices=tuple(kept), links=tuple(link for link in links if link is not None)
    )


def _among(link: Link, names: set[str]) -> Link | None:
    between = tuple(name for name in link.between if name in names)
    if len({link.port_of(name) for name in between}) < 2:
        return None
    ports = (tuple(name for name in port if name in names) for port in link.ports)
    return replace(link, between=between, ports=tuple(port for port in ports if port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subclusters:
    """All parts of a problem's cluster, with parts that are alike counted as one.

    ``classes`` are tuples of device indices; devices of a class are interchangeable. ``orbits`` are
    tuples of class indices; classes of an orbit are interchangeable as a whole.
    """

    problem: Problem
    classes: tuple[tuple[int, ...], ...]
    orbits: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> Subclusters:
        """Find the classes and orbits of a problem's cluster."""
        classes: list[list[int]] = []
        for d in range(problem.device_count):
            own = next((c for c in classes if _alike(problem, c[:1], [d])), None)
            if own is None:
                classes.append([d])
            else:
                own.append(d)
        orbits: list[list[int]] = []
        for i, members in enumerate(classes):
            orbit = next((o for o in orbits if _alike(problem, classes[o[0]], members)), None)
            if orbit is None:
                orbits.append([i])
            else:
                orbit.append(i)
        return cls(
            problem=problem,
            classes=tuple(map(tuple, classes)),
            orbits=tuple(map(tuple, orbits)),
        )

    def counts(self, devices: Iterable[int]) -> Counts:
        """Return a canonical key of a part, the same for all parts that are alike."""
        chosen = set(devices)
        found = [0] * len(self.classes)
        for orbit in self.orbits:
            sizes = sorted((len(chosen & set(self.classes[i])) for i in orbit), reverse=True)
            for i, size in zip(orbit, sizes, strict=True):
                found[i] = size
        return tuple(found)

    def joined(self, most: int) -> list[tuple[int, ...]]:
        """Return one connected part of each sort, as device indices; the smallest first.

        Raises:
            ValueError: there are more than ``most``; the message says how many, and what to do.
        """
        sorts = prod(comb(len(self.classes[o[0]]) + len(o), len(o)) for o in self.orbits) - 1
        if sorts > MOST_COMBINATIONS:
            raise ValueError(_why_too_many(self.problem.cluster, f"up to {sorts}", most))
        found = sorted(filter(self._is_joined, self._parts()), key=lambda part: (len(part), part))
        if len(found) > most:
            raise ValueError(_why_too_many(self.problem.cluster, str(len(found)), most))
        return found

    def _parts(self) -> Iterator[tuple[int, ...]]:
        ways = (
            combinations_with_replacement(range(len(self.classes[orbit[0]]), -1, -1), len(orbit))
            for orbit in self.orbits
        )
        order = list(chain.from_iterable(self.orbits))
        for chosen in product(*ways):
            sizes = chain.from_iterable(chosen)
            taken = (self.classes[i][:size] for i, size in zip(order, sizes, strict=True))
            yield tuple(sorted(chain.from_iterable(taken)))

    def _is_joined(self, part: tuple[int, ...]) -> bool:
        # Not empty, and connected by links in any direction.
        if not part:
            return False
        links = self.problem.connected[np.ix_(part, part)]
        reached = np.zeros(len(part), np.bool_)
        reached[0] = True
        for _ in part:
            reached = reached | (links | links.T)[reached].any(axis=0)
        return bool(reached.all())


def is_part(smaller: Counts, larger: Counts) -> bool:
    """Return whether a part with the smaller counts is contained in one with the larger counts."""
    return all(few <= many for few, many in zip(smaller, larger, strict=True))


def _alike(problem: Problem, some: Sequence[int], others: Sequence[int]) -> bool:
    # Whether exchanging devices pairwise (the first with the first, ...) changes nothing.
    if len(some) != len(others):
        return False
    devices = problem.cluster.devices
    for a, b in zip(some, others, strict=True):
        one, other = devices[a], devices[b]
        if (one.kind, one.price_per_hour) != (other.kind, other.price_per_hour):
            return False
        for of_device in (problem.memory_bytes, problem.cost_ns, problem.allowed):
            if not np.array_equal(of_device[..., a], of_device[..., b]):
                return False
    order = np.arange(len(devices))
    order[[*some, *others]] = [*others, *some]
    exchanged = np.ix_(order, order)
    for of_pair in (problem.connected, problem.latency_s, problem.bandwidth_bytes_per_s):
        if not np.array_equal(of_pair, of_pair[exchanged]):
            return False
    queues = np.stack([problem.queue, problem.second_queue])
    return _same_but_for_numbers(
        problem, queues, np.stack([problem.queue[exchanged], problem.second_queue[exchanged]])
    )


def _same_but_for_numbers(
    problem: Problem, queues: NDArray[np.int32], others: NDArray[np.int32]
) -> bool:
    # Whether the queues are the same up to their numbers, including their order of service.
    pairs = set(zip(queues.ravel().tolist(), others.ravel().tolist(), strict=True))
    ones, twos = zip(*pairs, strict=True)
    if len(set(ones)) != len(pairs) or len(set(twos)) != len(pairs):
        return False
    by_priority = {NO_QUEUE: None, **dict(enumerate(problem.queue_by_priority.tolist()))}
    return all(by_priority[one] == by_priority[two] for one, two in pairs)


def _why_too_many(cluster: Cluster, count: str, most: int) -> str:
    return (
        f"the {len(cluster)} devices of {cluster.name!r} make {count} different sub-clusters, at "
        f"most {most} are compared: leave out devices, or describe those that are alike alike "
        "(kind, price_per_hour, memory_bytes, links), since of these only the number counts"
    )
