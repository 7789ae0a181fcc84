"""Plans of replicas that slow each other down, by hand."""

from __future__ import annotations

import networkx as nx
import pytest

from envs.replication import Replication
from tests.helpers.clusters import nodes
from tests.helpers.replica_plans import layers, planned


def under_load(graph: nx.DiGraph[str]) -> nx.DiGraph[str]:
    """Return a graph whose ops take half as long again beside busy devices."""
    for _, node in graph.nodes(data=True):
        node["loaded_cost_s"] = {kind: 1.5 * cost for kind, cost in node["cost_s"].items()}
    return graph


def test_replicas_on_one_machine_slow_each_other_down() -> None:
    """A tower takes 24 ms, and 4 ms more for each of the three other devices that computes."""
    found = planned(under_load(layers(towers="ab")), nodes(1, 4, inside_bytes_per_s=1e13))
    alone_s = {each.name: each.step.alone_s for each in found.splits if each.step is not None}
    assert alone_s == pytest.approx(
        {"1 x 1": 48e-3, "2 x 1": 56e-3, "3 x 1": 64e-3, "4 x 1": 72e-3,
         "2 x 2": 36e-3, "1 x 4": 28e-3},
        rel=1e-4,
    )  # fmt: skip
    of_one = {each.name: 1 / each.one_samples_per_s for each in found.splits}
    expected = dict.fromkeys(of_one, 48e-3) | {"2 x 2": 28e-3, "1 x 4": 28e-3}
    assert of_one == pytest.approx(expected, rel=1e-4)
    [pair] = [each for each in found.splits if each.name == "2 x 2"]
    assert pair.efficiency == pytest.approx(28 / 36, rel=1e-4)


def test_the_curve_of_replicas_on_one_machine_includes_their_load() -> None:
    found = planned(under_load(layers()), nodes(1, 2, inside_bytes_per_s=1e15))
    assert found.best.name == "2 x 1"
    steps_s = [each.replicas / each.samples_per_s for each in found.curve]
    assert steps_s == pytest.approx([24e-3] + [36e-3] * (len(steps_s) - 1), rel=1e-3)
    shared = planned(
        under_load(layers()),
        nodes(1, 2, inside_bytes_per_s=1e15),
        Replication(batch="global", samples=8),
    )
    steps_s = [8 / each.samples_per_s for each in shared.curve[:2]]
    assert steps_s == pytest.approx([24e-3, 18e-3], rel=1e-3)
