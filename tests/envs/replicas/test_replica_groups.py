"""Groups of devices for replicas: close to each other, alike, and as many as possible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.replicas.groups import replica_groups
from graphs.graph import GraphArrays, add_op, new_graph
from tests.helpers.node_clusters import nodes


def problem_on(cluster: Cluster) -> Problem:
    graph = new_graph("one op")
    add_op(graph, "op", cost_s={"gpu": 1.0, "cpu": 20.0})
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def with_hosts(count: int, gpus: int) -> Cluster:
    """Return nodes whose last device is a CPU with slower links to the GPUs."""
    cluster = nodes(count, gpus + 1)
    devices = [
        replace(d, kind="cpu") if d.name.endswith(f"g{gpus}") else d for d in cluster.devices
    ]
    fast = [
        Link(between=link.between[:gpus], latency_s=0.0, bandwidth_bytes_per_s=1e12)
        for link in cluster.links[:count]
    ]
    return replace(cluster, devices=tuple(devices), links=(*fast, *cluster.links))


def test_groups_lie_within_nodes_while_they_fit() -> None:
    problem = problem_on(nodes(2, 4))
    assert replica_groups(problem, 1) == [[(d,) for d in range(8)]]
    assert replica_groups(problem, 2) == [[(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert replica_groups(problem, 3) == [[(0, 1, 2), (4, 5, 6)]]  # no group straddles nodes
    assert replica_groups(problem, 4) == [[(0, 1, 2, 3), (4, 5, 6, 7)]]
    assert replica_groups(problem, 5) == [[(0, 1, 2, 3, 4)]]
    assert replica_groups(problem, 8) == [[tuple(range(8))]]
    many = problem_on(nodes(4, 2))  # each group begins on a new node
    assert replica_groups(many, 3) == [[(0, 1, 2), (4, 5, 6)]]


def test_devices_of_one_kind_come_together() -> None:
    problem = problem_on(with_hosts(2, 2))
    assert replica_groups(problem, 1) == [[(0,), (1,), (3,), (4,)], [(2,), (5,)]]
    assert replica_groups(problem, 2) == [[(0, 1), (3, 4)]]
    assert replica_groups(problem, 3) == [[(0, 1, 2), (3, 4, 5)]]


def test_groups_with_other_memory_or_links_are_not_alike() -> None:
    cluster = nodes(2, 2)
    *others, last = cluster.devices
    smaller = replace(cluster, devices=(*others, replace(last, memory_bytes=1)))
    assert replica_groups(problem_on(smaller), 2) == [[(0, 1)], [(2, 3)]]
    slow = replace(cluster.links[1], latency_s=1.0)
    slower = replace(cluster, links=(cluster.links[0], slow, cluster.links[2]))
    assert replica_groups(problem_on(slower), 2) == [[(0, 1)], [(2, 3)]]
    shared = replace(cluster.links[1], sharing="bus")
    assert len(replica_groups(problem_on(replace(cluster, links=(shared, *cluster.links))), 2)) == 2


def test_devices_without_links_are_groups_of_their_own() -> None:
    names = ("a", "b", "c")
    devices = tuple(Device(name=name, kind="gpu", memory_bytes=1) for name in names)
    problem = problem_on(Cluster(name="apart", devices=devices))
    assert replica_groups(problem, 1) == [[(0,), (1,), (2,)]]
    assert replica_groups(problem, 3) == [[(0, 1, 2)]]


def test_no_replica_is_on_no_or_too_many_devices() -> None:
    problem = problem_on(nodes(1, 2))
    for size in (0, 3):
        with pytest.raises(ValueError, match=f"on {size} devices: give 1 .. 2"):
            replica_groups(problem, size)


@given(count=st.integers(1, 4), per_node=st.integers(1, 5), size=st.integers(1, 20))
def test_groups_are_disjoint_and_their_clusters_are_the_same(
    count: int, per_node: int, size: int
) -> None:
    problem = problem_on(nodes(count, per_node))
    size = min(size, problem.device_count)
    [groups] = replica_groups(problem, size)
    used = [d for group in groups for d in group]
    assert len(set(used)) == len(used)
    assert all(len(group) == size for group in groups)
    if size <= per_node:
        assert len(groups) == count * (per_node // size)
        assert all(len({d // per_node for d in group}) == 1 for group in groups)
    else:
        assert len(groups) == count // -(-size // per_node)
    graph = problem.graph
    first, *others = (Problem.of(graph, problem.cluster.part(group)) for group in groups)
    for other in others:
        for name in ("cost_ns", "memory_bytes", "latency_s", "bandwidth_bytes_per_s", "queue"):
            assert np.array_equal(getattr(first, name), getattr(other, name))
