"""Network levels and groups of devices derived from the links of clusters, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.collectives import Level
from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.replicas.topology import (
    are_linked,
    busy_shares,
    evened,
    levels_of,
    near_counts,
    nearest_groups,
    nested_blocks,
    replica_groups,
)
from graphs.costs import BusyShares
from graphs.graph import GraphArrays, add_op, new_graph
from tests.helpers.clusters import nodes, uneven_nodes


def problem_on(cluster: Cluster) -> Problem:
    graph = new_graph("one op")
    add_op(graph, "op", cost_s={"gpu": 1.0, "cpu": 20.0})
    return Problem.of(GraphArrays.from_graph(graph), cluster)


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
        replace(across, between=sum(ports, ()), bandwidth_bytes_per_s=2e10, ports=ports)
        for ports in (across.ports[:2], across.ports[2:])
    ]
    spine = replace(across, bandwidth_bytes_per_s=5e9, ports=tuple(rack.between for rack in racks))
    problem = problem_on(replace(cluster, links=(*inside, *racks, spine)))
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
    apart = replace(cluster, links=cluster.links[:2])
    with pytest.raises(ValueError, match="over n0:g0 and n1:g0: no link of cluster '2 nodes of 2'"):
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
    assert replica_groups(problem, 2) == [[(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert replica_groups(problem, 3) == [[(0, 1, 2), (4, 5, 6)]]  # no group straddles nodes
    assert replica_groups(problem, 5) == [[(0, 1, 2, 3, 4)]]
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


@pytest.mark.parametrize(
    ("memory_bytes", "wanted"),
    [((95, 100, 90), (90, 90, 90)), ((100, 89, 91), (91, 89, 91)), ((10, 9, 8), (9, 9, 8))],
)
def test_devices_of_one_kind_with_nearly_equal_memory_count_as_alike(
    memory_bytes: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    cluster = peers(3)
    devices = zip(cluster.devices, memory_bytes, strict=True)
    uneven = tuple(replace(d, memory_bytes=size) for d, size in devices)
    other = Device(name="other", kind="cpu", memory_bytes=99)
    found = evened(replace(cluster, devices=(*uneven, other)))
    assert tuple(d.memory_bytes for d in found.devices) == (*wanted, 99)


def test_devices_without_links_are_groups_of_their_own() -> None:
    problem = problem_on(replace(peers(3), links=()))
    assert replica_groups(problem, 1) == [[(0,), (1,), (2,)]]
    assert replica_groups(problem, 3) == [[(0, 1, 2)]]


@pytest.mark.parametrize("size", [0, 3])
def test_a_group_of_no_or_too_many_devices_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"on {size} devices"):
        replica_groups(problem_on(nodes(1, 2)), size)


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


def test_devices_of_other_replicas_on_the_machine_are_always_busy() -> None:
    graph = new_graph("one op")
    add_op(graph, "op", cost_s={"gpu": 1.0}, loaded_cost_s={"gpu": 2.0})
    load = Problem.of(GraphArrays.from_graph(graph), nodes(2, 5)).load  # 0 to 4, and 5 to 9

    def shares(*groups: tuple[int, ...]) -> tuple[float, float]:
        found = busy_shares(load, groups)
        return found.always, found.at_most

    assert shares((0,)) == (0, 0)
    assert shares((0,), (1,)) == (0.25, 0.25)
    assert shares((0,), (1,), (2,), (3,), (4,)) == (1, 1)
    assert shares((0, 1)) == (0, 0.25)
    assert shares((0, 1), (2, 3)) == (0.5, 0.75)
    assert shares((0, 1, 2, 3, 4)) == (0, 1)
    assert shares((0, 1), (5, 6)) == (0, 0.25)  # of another machine
    assert shares((0,), (5,), (6,), (7,)) == (0.5, 0.5)  # those on the second one
    assert shares((0, 1, 5), (2, 3, 6)) == (0.5, 0.75)  # across both
    assert busy_shares(None, [(0,), (1,)]) == BusyShares()


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (3, 5), (2, 2, 4)])
def test_replicas_are_near_each_other_wherever_their_node_is_listed(sizes: tuple[int, ...]) -> None:
    problem = problem_on(uneven_nodes(*sizes))
    [single] = replica_groups(problem, 1)
    assert near_counts(problem, single) == {max(sizes), sum(sizes)}
    nodes_of = [name.partition(":")[0] for name in problem.cluster.names]
    for count in range(1, sum(sizes) + 1):
        groups = nearest_groups(problem, single, count)
        assert len(set(groups)) == count
        used = [nodes_of[device] for (device,) in groups]
        assert (len(set(used)) == 1) == (count <= max(sizes))
        if count > max(sizes):  # the largest node is filled first
            assert max(map(used.count, used)) == max(sizes)


def test_devices_without_a_link_are_not_near() -> None:
    cluster = uneven_nodes(3)
    alone = replace(cluster.devices[0], name="alone")
    linked = tuple(link for link in cluster.links if link.bandwidth_bytes_per_s > 1e9)
    problem = problem_on(replace(cluster, devices=(alone, *cluster.devices), links=linked))
    [single] = replica_groups(problem, 1)
    assert nearest_groups(problem, single, 3) == [(1,), (2,), (3,)]
    assert are_linked(problem, single[1:])
    assert not are_linked(problem, single)


def test_blocks_inside_blocks_are_filled_first() -> None:
    """Two racks of two nodes of two devices, listed device by device."""
    places = [(rack, node, gpu) for gpu in range(2) for node in range(2) for rack in range(2)]
    names = {place: "r{}n{}g{}".format(*place) for place in places}
    devices = tuple(Device(name=name, kind="gpu", memory_bytes=1) for name in names.values())

    def link(inside: list[str], bandwidth: float) -> Link:
        return Link(between=tuple(inside), latency_s=0.0, bandwidth_bytes_per_s=bandwidth)

    links = [
        link([name for place, name in names.items() if place[:2] == (rack, node)], 1e11)
        for rack in range(2)
        for node in range(2)
    ]
    links += [
        link([name for place, name in names.items() if place[0] == rack], 1e10) for rack in range(2)
    ]
    cluster = Cluster(name="racks", devices=devices, links=(*links, link([*names.values()], 1e9)))
    problem = problem_on(cluster)
    [single] = replica_groups(problem, 1)
    chosen = {cluster.names[device] for (device,) in nearest_groups(problem, single, 6)}
    racks = [sorted(name for name in chosen if name.startswith(rack)) for rack in ("r0", "r1")]
    assert sorted(map(len, racks)) == [2, 4]
    [pair] = [rack for rack in racks if len(rack) == 2]
    assert pair[0][:4] == pair[1][:4]  # of one node
