"""Costs for other device kinds, and the source of each op's cost."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from graphs.costs import cost_source, with_costs
from graphs.graph import add_op, new_graph


def three_ops() -> nx.DiGraph[str]:
    graph = new_graph("three", {"*": "guessed", "x": "old"})
    for name in "abc":
        add_op(graph, name, cost_s={"*": 1.0, "x": 9.0}, cost_source={"x": "older"})
    return graph


def test_the_most_frequent_source_is_that_of_the_kind_and_others_stay_with_their_ops() -> None:
    costs_s = {"x": np.array([1.0, 2.0, 3.0])}
    found = with_costs(three_ops(), costs_s, {"x": ["cached", "measured", "cached"]})
    assert found.graph["cost_source"] == {"*": "guessed", "x": "cached"}
    assert [found.nodes[name]["cost_s"]["x"] for name in "abc"] == [1.0, 2.0, 3.0]
    assert [found.nodes[name]["cost_source"] for name in "abc"] == [{}, {"x": "measured"}, {}]
    told = [cost_source(found, name, "x") for name in "abc"]
    assert told == ["cached", "measured", "cached"]
    assert cost_source(found, "a", "y") == "guessed"
    assert with_costs(three_ops(), costs_s, {"x": "same"}).nodes["b"]["cost_source"] == {}


@pytest.mark.parametrize(
    ("costs", "sources", "message"),
    [(2, 3, "2 costs for kind 'x', but the graph has 3"), (3, 2, "2 sources for kind 'x'")],
)
def test_costs_and_sources_are_one_for_each_op(costs: int, sources: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_costs(three_ops(), {"x": np.ones(costs)}, {"x": ["told"] * sources})
