"""Sub-clusters: links among the remaining devices, and one sub-cluster of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.cluster import SHARINGS, Cluster, Device, Link
from envs.problem import Problem
from envs.subclusters import Subclusters, is_part, part_of
from graphs.graph import GraphArrays, add_edge, add_op, new_graph


def two_ops(pinned: tuple[str, ...] | None = None) -> GraphArrays:
    graph = new_graph("two")
    add_op(graph, "first", cost_s={"*": 1e-3, "slow": 2e-3}, output_bytes=10, devices=pinned)
    add_op(graph, "second", cost_s={"*": 1e-3})
    add_edge(graph, "first", "second")
    return GraphArrays.from_graph(graph)


def device(name: str, kind: str = "gpu", **more: Any) -> Device:
    return Device(name=name, kind=kind, memory_bytes=1000, **more)


def link(names: Sequence[str], **more: Any) -> Link:
    return Link(between=tuple(names), latency_s=1e-6, **{"bandwidth_bytes_per_s": 1e9, **more})


def problem_of(devices: Sequence[Device], links: Sequence[Link]) -> Problem:
    return Problem.of(two_ops(), Cluster(name="all", devices=tuple(devices), links=tuple(links)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw up to five devices of few classes, with links that leave some unconnected."""
    names = tuple("abcde"[: draw(st.integers(1, 5))])
    devices = [
        device(
            name,
            draw(st.sampled_from(["gpu", "slow"])),
            price_per_hour=draw(st.sampled_from([1, 2])),
        )
        for name in names
    ]
    links = []
    for _ in range(draw(st.integers(0, 2)) if len(names) > 1 else 0):
        sharing, full = draw(st.sampled_from(SHARINGS)), draw(st.booleans())
        ends = draw(st.permutations(names))[: draw(st.integers(2, len(names)))]
        links.append(
            link(
                ends,
                sharing=sharing,
                full_duplex=full,
                one_way=len(ends) == 2 and draw(st.booleans()),
                ports=draw(st.sampled_from([(), (tuple(ends[1:]),)])),
                ingress=sharing == "egress" and full and draw(st.booleans()),
                order=draw(st.sampled_from(["fifo", "priority"])),
            )
        )
    return problem_of(devices, links)


def subsets(count: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(count), k) for k in range(1, count + 1)))


def queues(problem: Problem, order: Sequence[int]) -> list[Any]:
    """Return the queues of all pairs, numbered by first occurrence, and their service order."""
    pairs = np.ix_(order, order)
    numbers = [
        *problem.queue[pairs].ravel().tolist(),
        *problem.second_queue[pairs].ravel().tolist(),
    ]
    first = {number: numbers.index(number) for number in numbers}
    by_priority = {-1: None, **dict(enumerate(problem.queue_by_priority.tolist()))}
    return [(first[number], number < 0, by_priority[number]) for number in numbers]


def looks(problem: Problem, order: Sequence[int]) -> list[Any]:
    """Return all properties of these devices that a placement can observe, in this order."""
    order = list(order)
    pairs = np.ix_(order, order)
    devices = [problem.cluster.devices[d] for d in order]
    return [
        [(d.kind, d.price_per_hour) for d in devices],
        problem.memory_bytes[order].tolist(),
        problem.cost_ns[:, order].tolist(),
        problem.allowed[:, order].tolist(),
        *(m[pairs].tolist() for m in (problem.connected, problem.latency_s)),
        problem.bandwidth_bytes_per_s[pairs].tolist(),
        queues(problem, order),
    ]


def is_joined(problem: Problem, part: Sequence[int]) -> bool:
    """Return whether every split of the devices in two has a link across."""
    links = problem.connected | problem.connected.T
    splits = chain.from_iterable(combinations(part, k) for k in range(1, len(part)))
    return all(any(links[a, b] for a in ones for b in part if b not in ones) for ones in splits)


@settings(max_examples=60)
@given(problem=problems())
def test_a_part_of_a_cluster_looks_as_it_did_in_the_whole(problem: Problem) -> None:
    for part in subsets(problem.device_count):
        alone = Problem.of(problem.graph, part_of(problem.cluster, part))
        assert looks(alone, range(len(part))) == looks(problem, part)


@settings(max_examples=60)
@given(problem=problems())
def test_every_joined_part_has_one_that_is_alike_and_no_other_is_listed(problem: Problem) -> None:
    found = Subclusters.of(problem)
    listed = found.joined(64)
    sorts = {found.counts(part): part for part in listed}
    assert len(sorts) == len(listed)
    whole = looks(problem, range(problem.device_count))
    exchanges = [
        order
        for order in permutations(range(problem.device_count))
        if looks(problem, order) == whole
    ]
    for part in subsets(problem.device_count):
        counts = found.counts(part)
        assert (counts in sorts) == is_joined(problem, part)
        if counts in sorts:
            assert any({order[d] for d in part} == set(sorts[counts]) for order in exchanges)


@settings(max_examples=60)
@given(problem=problems())
def test_a_part_of_a_part_has_no_more_of_anything(problem: Problem) -> None:
    found = Subclusters.of(problem)
    for larger in subsets(problem.device_count):
        for smaller in subsets(problem.device_count):
            inside = any(
                found.counts(other) == found.counts(smaller)
                for other in subsets(problem.device_count)
                if set(other) <= set(larger)
            )
            assert is_part(found.counts(smaller), found.counts(larger)) == inside


def test_of_devices_that_are_alike_only_the_number_counts() -> None:
    devices = [*(device(f"g{i}") for i in range(8)), device("old", "slow")]
    problem = problem_of(devices, [link([d.name for d in devices])])
    found = Subclusters.of(problem)
    assert found.classes == (tuple(range(8)), (8,))
    assert len(found.joined(64)) == 9 * 2 - 1


@pytest.mark.parametrize(
    "change",
    [{"kind": "slow"}, {"price_per_hour": 3.0}, {"memory_bytes": 1}, {"launch_s": 1.0}],
)
def test_devices_that_differ_in_anything_are_not_alike(change: dict[str, Any]) -> None:
    devices = [device("a"), device("b"), replace(device("c"), **change)]
    assert Subclusters.of(problem_of(devices, [link("abc")])).classes == ((0, 1), (2,))


def test_a_device_that_the_graph_asks_for_is_like_no_other() -> None:
    cluster = Cluster(name="all", devices=tuple(map(device, "abc")), links=(link("abc"),))
    assert Subclusters.of(Problem.of(two_ops(pinned=("b",)), cluster)).classes == ((0, 2), (1,))


def test_equal_nodes_are_alike() -> None:
    names = [f"n{n}:g{g}" for n in range(3) for g in range(2)]
    nodes = [names[:2], names[2:4], names[4:]]
    card = link(names, ports=tuple(map(tuple, nodes)))
    inside = [link(node, bandwidth_bytes_per_s=1e11) for node in nodes]
    found = Subclusters.of(problem_of(list(map(device, names)), [card, *inside]))
    assert found.classes == ((0, 1), (2, 3), (4, 5))
    assert found.orbits == ((0, 1, 2),)
    parts = found.joined(64)
    assert len(parts) == 9  # 1, 2, 1+1, 2+1, 2+2, 1+1+1, 2+1+1, 2+2+1, 2+2+2
    assert found.counts([3, 4, 5]) == found.counts([0, 1, 2]) == (2, 1, 0)


@pytest.mark.parametrize(("count", "said"), [(7, "make 127 different"), (40, "make up to 10995")])
def test_too_many_sub_clusters_are_refused_with_their_number(count: int, said: str) -> None:
    devices = [device(f"d{i}", price_per_hour=i) for i in range(count)]
    problem = problem_of(devices, [link([d.name for d in devices])])
    with pytest.raises(ValueError, match=rf"the {count} devices of 'all' {said}.*at most 64"):
        Subclusters.of(problem).joined(64)
