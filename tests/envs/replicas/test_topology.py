"""Network levels derived from the links of clusters, checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.collectives import Level
from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.replicas.topology import levels_of, nested_blocks
from graphs.flat import flat_graph
from tests.helpers.node_clusters import nodes


def problem_on(cluster: Cluster) -> Problem:
    nothing = np.zeros(0, np.int64)
    graph = flat_graph(
        "one op",
        cost_s=np.ones(1),
        source=nothing,
        target=nothing,
        output_bytes=np.zeros(1, np.int64),
    )
    return Problem.of(graph, cluster)


def peers(count: int, **link: Any) -> Cluster:
    names = tuple(f"g{i}" for i in range(count))
    return Cluster(
        name="peers",
        devices=tuple(Device(name=name, kind="gpu", memory_bytes=1) for name in names),
        links=(Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e9, **link),),
    )


def level(ranks: int, bandwidth: float, latency_s: float = 0.0, ports: int = 1) -> Level:
    return Level(ranks=ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, ports=ports)


def test_a_single_device_has_no_network() -> None:
    assert levels_of(problem_on(nodes(2, 2)), [1]) == ()


def test_nodes_with_one_card_each_are_two_levels() -> None:
    problem = problem_on(nodes(3, 4, inside_s=1e-6, across_s=5e-6))
    inside, across = level(4, 1e11, 1e-6), level(3, 1e10, 5e-6)
    assert levels_of(problem, range(12)) == (inside, across)
    assert levels_of(problem, range(4)) == (inside,)
    assert levels_of(problem, [0, 4, 8]) == (across,)  # one device of each node
    assert levels_of(problem, [0, 2, 4, 6]) == (level(2, 1e11, 1e-6), level(2, 1e10, 5e-6))


def test_a_node_with_a_card_for_each_device_has_as_many_ports() -> None:
    problem = problem_on(nodes(2, 4, own_cards=True))
    assert levels_of(problem, range(8)) == (level(4, 1e11), level(2, 1e10, ports=4))


def test_racks_are_a_third_level() -> None:
    cluster = nodes(4, 2)
    inside, across = cluster.links[:4], cluster.links[4]
    racks = [
        Link(
            between=tuple(name for port in ports for name in port),
            latency_s=0.0,
            bandwidth_bytes_per_s=2e10,
            ports=ports,
        )
        for ports in (across.ports[:2], across.ports[2:])
    ]
    spine = Link(
        between=across.between,
        latency_s=0.0,
        bandwidth_bytes_per_s=5e9,
        ports=tuple(rack.between for rack in racks),
    )
    whole = Cluster(name="racks", devices=cluster.devices, links=(*inside, *racks, spine))
    problem = problem_on(whole)
    assert levels_of(problem, range(8)) == (level(2, 1e11), level(2, 2e10), level(2, 5e9))
    assert nested_blocks(problem, range(8))[2] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_nodes_that_are_not_equally_large_are_peers_at_the_slowest_link() -> None:
    problem = problem_on(nodes(2, 3, inside_s=1e-6, across_s=5e-6))
    assert levels_of(problem, [0, 1, 2, 3]) == (level(4, 1e10, 5e-6),)


@pytest.mark.parametrize(
    ("link", "bandwidth"),
    [
        ({"sharing": "egress"}, 1e9),
        ({"sharing": "pair"}, 1e9),
        ({"sharing": "none"}, 1e9),
        ({"sharing": "egress", "full_duplex": False}, 1e9 / 2),  # a port sends and receives
        ({"sharing": "bus"}, 1e9 / 4),  # all four share it
    ],
)
def test_what_devices_share_is_seen_from_their_queues(
    link: dict[str, Any], bandwidth: float
) -> None:
    assert levels_of(problem_on(peers(4, **link)), range(4)) == (level(4, bandwidth, 1e-6),)


def test_devices_without_a_link_cannot_reduce() -> None:
    cluster = nodes(2, 2)
    apart = Cluster(name="apart", devices=cluster.devices, links=cluster.links[:2])
    with pytest.raises(ValueError, match="over n0:g0 and n1:g0: no link of cluster 'apart'"):
        levels_of(problem_on(apart), range(4))


@given(
    count=st.integers(1, 4),
    per_node=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_levels_hold_all_devices_whatever_their_order(
    count: int, per_node: int, order: Any
) -> None:
    problem = problem_on(nodes(count, per_node))
    devices = list(range(count * per_node))
    expected = levels_of(problem, devices)
    assert np.prod([one.ranks for one in expected], initial=1) == len(devices)
    order.shuffle(devices)
    assert [one.ranks for one in levels_of(problem, devices)] == [one.ranks for one in expected]
