"""Costs for other device kinds, their sources, and the summary of a graph."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from graphs.costs import (
    BusyShares,
    GraphSummary,
    cost_source,
    with_busy_devices,
    with_costs,
    with_part_of_batch,
)
from graphs.graph import add_edge, add_op, new_graph


def diamond() -> nx.DiGraph[str]:
    """Return a -> (b, c) -> d, costs 1, 2, 4, 1 on "x"; only d costs something else on "y"."""
    graph = new_graph("diamond")
    for name, seconds in zip("abcd", (1.0, 2.0, 4.0, 1.0), strict=True):
        add_op(
            graph,
            name,
            cost_s={"x": seconds, "y": 3.0} if name == "d" else {"x": seconds},
            phase="backward" if name == "d" else "forward",
            flops=10,
            parameter_bytes=100,
            gradient_bytes=90,
            optimizer_bytes=8,
            saved_bytes=5,
        )
    for source, target in ("ab", "ac", "bd", "cd"):
        add_edge(graph, source, target)
    return graph


def test_counts_sums_critical_path_and_headroom() -> None:
    summary = GraphSummary.of(diamond(), dearest=2)
    assert summary.ops == {"forward": 3, "backward": 1, "optimizer": 0}
    assert (summary.edges, summary.flops) == (4, 40)
    assert (summary.parameter_bytes, summary.saved_bytes) == (400, 20)
    assert (summary.gradient_bytes, summary.optimizer_bytes) == (360, 32)
    work = summary.work["x"]
    assert work.total_s == 8.0
    assert work.critical_path_s == 1.0 + 4.0 + 1.0
    assert work.headroom == pytest.approx(8 / 6)
    assert [(op.id, op.cost_s) for op in work.dearest] == [("c", 4.0), ("b", 2.0)]


def test_dearest_ops_say_where_their_costs_come_from() -> None:
    graph = diamond()
    graph.graph["cost_source"] = {"x": "measured", "*": "guessed"}
    graph.nodes["c"]["cost_source"] = {"x": "cached"}
    graph.nodes["d"]["cost_s"] = {"*": 3.0}
    dearest = GraphSummary.of(graph).work["x"].dearest
    assert [(op.id, op.source) for op in dearest] == [
        ("c", "cached"),
        ("d", "guessed"),
        ("b", "measured"),
        ("a", "measured"),
    ]


def test_kinds_that_some_ops_have_no_cost_for_are_only_counted() -> None:
    summary = GraphSummary.of(diamond())
    assert set(summary.work) == {"x"}
    assert summary.partly_known == {"y": 1}


def test_costs_for_any_kind_fill_in() -> None:
    graph = diamond()
    for name in graph:
        graph.nodes[name]["cost_s"]["*"] = 1.0
    work = GraphSummary.of(graph).work
    assert work["*"].critical_path_s == 3.0
    assert work["y"].critical_path_s == 1.0 + 1.0 + 3.0


def test_without_costs_or_time_there_is_no_headroom_to_speak_of() -> None:
    graph = new_graph("one")
    add_op(graph, "a", cost_s={})
    assert GraphSummary.of(graph).work == {}
    graph.nodes["a"]["cost_s"] = {"*": 0.0}
    assert GraphSummary.of(graph).work["*"].headroom == 1.0


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


def test_what_has_no_new_cost_keeps_its_cost_and_the_source_of_it() -> None:
    graph = three_ops()
    for name, source in zip("abc", ({}, {}, {"x": "older"}), strict=True):
        graph.nodes[name]["cost_source"] = source
    found = with_costs(graph, {"x": np.array([1.0, np.nan, np.nan])}, {"x": "new"})
    assert [found.nodes[name]["cost_s"]["x"] for name in "abc"] == [1.0, 9.0, 9.0]
    assert [cost_source(found, name, "x") for name in "abc"] == ["new", "old", "older"]
    same = with_costs(graph, {"x": np.full(3, np.nan)}, {"x": "new"})
    assert [cost_source(same, name, "x") for name in "abc"] == ["old", "old", "older"]


def test_new_costs_replace_the_loaded_costs_of_their_kind() -> None:
    graph = three_ops()
    for name in "ab":
        graph.nodes[name]["loaded_cost_s"] = {"*": 9.0, "x": 8.0}
    costs_s, loaded_s = {"x": np.array([1.0, 2.0, 3.0])}, {"x": np.array([1.5, np.nan, 4.0])}
    found = with_costs(graph, costs_s, {"x": ""}, loaded_s)
    assert [found.nodes[name]["loaded_cost_s"] for name in "abc"] == [
        {"*": 9.0, "x": 1.5},
        {"*": 9.0},
        {"x": 4.0},
    ]
    assert with_costs(graph, costs_s, {"x": ""}).nodes["a"]["loaded_cost_s"] == {"*": 9.0}


def test_launches_come_with_costs_and_do_not_scale_with_the_batch() -> None:
    costs_s, launches_s = {"x": np.ones(3)}, {"x": np.array([1.5, np.nan, 4.0])}
    graph = with_costs(three_ops(), costs_s, {"x": ""}, launches_s=launches_s)
    assert [graph.nodes[name]["launch_s"] for name in "abc"] == [{"x": 1.5}, {}, {"x": 4.0}]
    assert with_part_of_batch(graph, 3).nodes["a"]["launch_s"] == {"x": 1.5}
    assert with_costs(graph, costs_s, {"x": ""}).nodes["a"]["launch_s"] == {}


def test_loaded_costs_scale_with_the_batch() -> None:
    graph = three_ops()
    graph.nodes["a"]["loaded_cost_s"] = {"*": 9.0}
    assert with_part_of_batch(graph, 3).nodes["a"]["loaded_cost_s"] == {"*": 3.0}


@pytest.mark.parametrize(
    ("costs", "sources", "message"),
    [(2, 3, "2 costs for kind 'x', but the graph has 3"), (3, 2, "2 sources for kind 'x'")],
)
def test_costs_and_sources_are_one_for_each_op(costs: int, sources: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_costs(three_ops(), {"x": np.ones(costs)}, {"x": ["told"] * sources})


def test_beside_busy_devices_an_op_costs_their_share_of_its_loaded_cost() -> None:
    graph = three_ops()
    graph.nodes["a"]["loaded_cost_s"] = {"*": 4.0, "x": 10.5}
    found = with_busy_devices(graph, BusyShares(always=1 / 3, at_most=2 / 3))
    assert found.nodes["a"]["cost_s"] == {"*": 2.0, "x": 9.5}
    assert found.nodes["a"]["loaded_cost_s"] == {"*": 3.0, "x": 10.0}
    assert found.nodes["b"] == graph.nodes["b"]
    assert graph.nodes["a"]["cost_s"] == {"*": 1.0, "x": 9.0}
    assert with_busy_devices(graph, BusyShares()) is graph
    assert with_busy_devices(diamond(), BusyShares(always=1.0)).nodes == diamond().nodes
