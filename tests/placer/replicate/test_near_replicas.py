"""Replicas are where their network is fast, wherever the cluster lists these devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envs.replication import Replication
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
