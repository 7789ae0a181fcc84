"""Replicas are where their network is fast, wherever the cluster lists these devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envs.problem import Problem
from envs.replication import Replication
from graphs.graph import GraphArrays
from placer.replicate.groups import planned_groups
from tests.helpers.clusters import nodes, uneven_nodes
from tests.helpers.replica_plans import layers, planned


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)])
def test_the_order_of_devices_does_not_matter(sizes: tuple[int, ...]) -> None:
    cluster = uneven_nodes(*sizes)
    large = f"n{sizes.index(4)}:"
    for replicas in (None, 2):
        best = planned(layers(), cluster, Replication(replicas=replicas)).best
        assert best.replicas == (replicas or 4)
        assert all(name.startswith(large) for group in best.groups for name in group)
    assert best.samples_per_s == pytest.approx(2 / 24e-3, rel=0.01)


def test_a_second_node_over_a_slow_network_makes_no_plan_worse() -> None:
    wanted = Replication(batch="global", samples=64)
    alone = planned(layers(), nodes(1, 4), wanted).best
    both = planned(layers(), nodes(2, 4, across_bytes_per_s=1e8), wanted).best
    assert both.samples_per_s == pytest.approx(alone.samples_per_s)
    assert alone.name == both.name == "4 x 1"


def test_a_node_that_does_not_divide_the_batch_is_filled_as_far_as_it_does() -> None:
    wanted = Replication(batch="global", samples=64)
    cluster = nodes(2, 6, across_bytes_per_s=1e8)
    problem = Problem.of(GraphArrays.from_graph(layers()), cluster)
    all_groups = [each.groups for each in planned_groups(problem, wanted)]
    counts = {len(groups) for groups in all_groups if len(groups[0]) == 1}
    assert counts == {4, 8, 12}


def test_more_than_sixteen_replicas_may_fill_a_node() -> None:
    problem = Problem.of(GraphArrays.from_graph(layers()), nodes(2, 24))
    counts = {len(each.groups) for each in planned_groups(problem, Replication())}
    assert counts >= {*range(1, 17), 24, 32, 48}


def test_groups_without_links_are_planned_only_where_there_are_no_others() -> None:
    cluster = uneven_nodes(4, 4, 4, 4)
    *inside, _ = cluster.links
    for links, sizes in ((tuple(inside), [2]), ((), [8])):
        problem = Problem.of(GraphArrays.from_graph(layers()), replace(cluster, links=links))
        every = planned_groups(problem, Replication(replicas=2))
        assert [len(each.groups[0]) for each in every if not each.is_baseline] == sizes


def test_smaller_groups_within_a_node_are_tried_where_larger_ones_are_apart() -> None:
    cluster = nodes(2, 2, across_bytes_per_s=1e8)
    found = planned(layers(), cluster, Replication(replicas=2))
    asked = [split.name for split in found.splits if not split.is_baseline]
    assert asked[0] == "2 x 1"
    assert set(asked) == {"2 x 1", "2 x 2"}


def test_groups_that_no_link_joins_give_way_to_smaller_ones() -> None:
    cluster = uneven_nodes(2, 2)
    *inside, _ = cluster.links
    best = planned(layers(), replace(cluster, links=tuple(inside)), Replication(replicas=2)).best
    assert best.name == "2 x 1"
