"""Parts of a cluster: their devices and links are those of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import SHARINGS, Cluster, Device, Link
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph


def two_ops() -> GraphArrays:
    graph = new_graph("two")
    add_op(graph, "first", cost_s={"*": 1e-3, "slow": 2e-3}, output_bytes=10)
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


@settings(max_examples=60)
@given(problem=problems())
def test_a_part_of_a_cluster_looks_as_it_did_in_the_whole(problem: Problem) -> None:
    for part in subsets(problem.device_count):
        alone = Problem.of(problem.graph, problem.cluster.part(part))
        assert looks(alone, range(len(part))) == looks(problem, part)
