"""Schema of the graph, and its flat arrays compared with networkx."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.graph import (
    PHASES,
    SIZES,
    GraphArrays,
    add_edge,
    add_op,
    attributes_of,
    graph_hash,
    new_graph,
    topological_order,
)
from graphs.graph_file import completed, graph_to_dict


def diamond() -> nx.DiGraph[str]:
    """Return a fork and a join a -> b, c -> d, with ops added out of order."""
    graph = new_graph("diamond", {"*": "by hand"})
    for op_id, seconds in {"d": 4.0, "b": 2.0, "a": 1.0, "c": 3.0}.items():
        add_op(graph, op_id, cost_s={"*": seconds}, output_bytes=10)
    for source, target in ("ab", "ac", "bd", "cd"):
        add_edge(graph, source, target)
    return graph


@st.composite
def random_dags(draw: st.DrawFn) -> nx.DiGraph[str]:
    """Return up to twelve ops whose order of insertion is not topological."""
    count = draw(st.integers(1, 12))
    graph = new_graph("random")
    for i in draw(st.permutations(range(count))):
        add_op(graph, f"op{i}", cost_s={"*": i / 7}, output_bytes=draw(st.integers(0, 99)))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    for i, j in draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []:
        add_edge(graph, f"op{i}", f"op{j}", draw(st.integers(0, 2**60)))
    return graph


@settings(max_examples=80)
@given(random_dags())
def test_arrays_say_what_networkx_says(graph: nx.DiGraph[str]) -> None:
    arrays = GraphArrays.from_graph(graph)
    assert arrays.ids == tuple(graph)
    assert len(arrays) == len(graph)
    assert arrays.edge_count == graph.number_of_edges()
    for i, op_id in enumerate(arrays.ids):
        out = slice(arrays.successor_start[i], arrays.successor_start[i + 1])
        successors = arrays.successors[out].tolist()
        assert successors == sorted(successors)
        assert {arrays.ids[j] for j in successors} == set(graph.succ[op_id])
        sizes = {arrays.ids[j]: b for j, b in zip(successors, arrays.edge_bytes[out], strict=True)}
        assert sizes == {target: edge["bytes"] for target, edge in graph.succ[op_id].items()}
        into = slice(arrays.predecessor_start[i], arrays.predecessor_start[i + 1])
        assert {arrays.ids[j] for j in arrays.predecessors[into]} == set(graph.pred[op_id])
        for j, e in zip(arrays.predecessors[into], arrays.predecessor_edge[into], strict=True):
            assert arrays.successors[e] == i
            assert arrays.successor_start[j] <= e < arrays.successor_start[j + 1]
        assert arrays.output_bytes[i] == attributes_of(graph, op_id)["output_bytes"]
    place = np.argsort(arrays.topological)
    for source, target in graph.edges:
        assert place[arrays.ids.index(source)] < place[arrays.ids.index(target)]


INDICES = st.integers(0, 7)


@settings(max_examples=200)
@given(st.permutations(range(8)), st.lists(st.tuples(INDICES, INDICES), max_size=14))
def test_topological_order_is_that_of_networkx_and_a_shown_cycle_is_one(
    added: list[int], pairs: list[tuple[int, int]]
) -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(map(str, added))
    graph.add_edges_from((str(a), str(b)) for a, b in pairs)
    place = {op_id: i for i, op_id in enumerate(graph)}
    if nx.is_directed_acyclic_graph(graph):
        expected = list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
        assert topological_order(graph) == expected
        return
    with pytest.raises(ValueError, match="cycle of") as refusal:
        topological_order(graph)
    shown = str(refusal.value).rpartition(": ")[2].split(" -> ")
    assert shown[-1] in ("...", shown[0])
    assert nx.is_path(graph, [op_id for op_id in shown if op_id != "..."])


def test_arrays_cannot_be_written() -> None:
    arrays = GraphArrays.from_graph(diamond())
    for array in (arrays.successors, arrays.edge_bytes, arrays.topological, arrays.cost_s["*"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_groups_are_numbered_by_first_use() -> None:
    graph = new_graph("groups")
    for op_id, group in {"a": "y", "b": None, "c": "x", "d": "y"}.items():
        add_op(graph, op_id, cost_s={}, colocate=group)
    assert GraphArrays.from_graph(graph).group.tolist() == [0, -1, 1, 0]


def test_attributes_reach_the_arrays_unchanged() -> None:
    graph = new_graph("one")
    sizes: dict[str, Any] = {name: i for i, name in enumerate(SIZES)}
    add_op(graph, "a", cost_s={}, op="mm", phase="backward", module="m", devices=("cpu",), **sizes)
    arrays = GraphArrays.from_graph(graph)
    assert (arrays.name, arrays.ops, arrays.modules) == ("one", ("mm",), ("m",))
    assert PHASES[arrays.phase[0]] == "backward"
    assert arrays.allowed == (("cpu",),)
    assert {name: getattr(arrays, name).tolist() for name in SIZES} == {
        name: [size] for name, size in sizes.items()
    }


def test_cost_of_a_kind_falls_back_to_that_of_any_kind() -> None:
    graph = new_graph("costs")
    add_op(graph, "both", cost_s={"cuda": 1.0, "*": 2.0})
    add_op(graph, "any", cost_s={"*": 3.0})
    add_op(graph, "cuda only", cost_s={"cuda": 4.0})
    arrays = GraphArrays.from_graph(graph)
    np.testing.assert_array_equal(arrays.costs_for("cuda"), [1, 3, 4])
    np.testing.assert_array_equal(arrays.costs_for("cpu"), [2, 3, np.nan])


def test_loaded_costs_are_those_of_the_kind_that_the_cost_is_from() -> None:
    graph = new_graph("costs")
    costs = {"cuda": 1.0, "*": 2.0}
    add_op(graph, "both", cost_s=costs, loaded_cost_s={"cuda": 1.5, "*": 2.5})
    add_op(graph, "any", cost_s={"*": 3.0}, loaded_cost_s={"*": 3.5})
    add_op(graph, "only of any", cost_s=costs, loaded_cost_s={"*": 2.0})
    add_op(graph, "none", cost_s=costs)
    arrays = GraphArrays.from_graph(graph)
    np.testing.assert_array_equal(arrays.loaded_costs_for("cuda"), [1.5, 3.5, np.nan, np.nan])
    np.testing.assert_array_equal(arrays.loaded_costs_for("cpu"), [2.5, 3.5, 2.0, np.nan])


def test_launches_are_those_of_the_kind_that_the_cost_is_from() -> None:
    graph = new_graph("launches")
    add_op(graph, "both", cost_s={"cuda": 1.0, "*": 2.0}, launch_s={"cuda": 0.1, "*": 0.2})
    add_op(graph, "only of any", cost_s={"cuda": 1.0, "*": 2.0}, launch_s={"*": 0.2})
    arrays = GraphArrays.from_graph(graph)
    np.testing.assert_array_equal(arrays.launches_for("cuda"), [0.1, np.nan])
    np.testing.assert_array_equal(arrays.launches_for("cpu"), [0.2, 0.2])


def test_hash_leaves_out_costs_names_and_the_order_of_edges() -> None:
    graph, other = diamond(), diamond()
    other.graph["name"] = "renamed"
    attributes_of(other, "a")["cost_s"] = {"cuda": 9.0}
    other.remove_edge("a", "b")
    add_edge(other, "a", "b")
    assert graph_hash(other) == graph_hash(graph)
    assert GraphArrays.from_graph(other).hash == graph_hash(graph)


def test_hash_does_not_change_between_runs() -> None:
    """Placement files contain the hash: a change would invalidate all stored ones."""
    assert graph_hash(diamond()).startswith("002fe08d71b4f785")


def test_hash_changes_with_sizes_edges_ids_and_order_of_ops() -> None:
    larger, richer, heavier, fewer = (diamond() for _ in range(4))
    larger.nodes["b"]["output_bytes"] += 1
    richer.nodes["b"]["parameter_bytes"] += 1
    heavier.edges["a", "b"]["bytes"] = 11
    fewer.remove_edge("b", "d")
    renamed = nx.relabel_nodes(diamond(), {"a": "z"})
    reordered = new_graph("diamond")
    reordered.add_nodes_from(sorted(diamond().nodes(data=True)))
    reordered.add_edges_from(diamond().edges(data=True))
    others = [larger, richer, heavier, fewer, renamed, reordered]
    assert len({graph_hash(graph) for graph in [diamond(), *others]}) == 7


def test_long_cycle_is_shown_in_part() -> None:
    graph = new_graph("ring")
    for i in range(20):
        add_op(graph, f"op{i}", cost_s={})
    for i in range(20):
        add_edge(graph, f"op{i}", f"op{(i + 1) % 20}")
    with pytest.raises(ValueError, match=r"cycle of 20 ops: (op\d+ -> ){6}\.\.\.$"):
        topological_order(graph)


def test_empty_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="graph 'void' has no ops"):
        GraphArrays.from_graph(new_graph("void"))


def test_hand_made_graph_is_refused_until_it_is_completed() -> None:
    plain: nx.DiGraph[str] = nx.DiGraph()
    plain.add_node("a", cost_s={"*": 1}, output_bytes=np.int32(7))
    plain.add_node("b", cost_s={"*": 1.0})
    plain.add_node("c", cost_s={"*": 1.0})
    plain.add_edge("a", "b")
    plain.add_edge("a", "c", bytes=3)
    with pytest.raises(ValueError, match="op 'a': lacks colocate, cost_source"):
        GraphArrays.from_graph(plain)
    expected = new_graph("")
    for op_id, size in (("a", 7), ("b", 0), ("c", 0)):
        add_op(expected, op_id, cost_s={"*": 1.0}, output_bytes=size)
    add_edge(expected, "a", "b", 7)
    add_edge(expected, "a", "c", 3)
    assert graph_to_dict(completed(plain)) == graph_to_dict(expected)
    assert dict(plain.nodes["b"]) == {"cost_s": {"*": 1.0}}


@pytest.mark.parametrize(
    ("node", "edge", "message"),
    [
        ({"output_byte": 3}, {}, "op 'b': unknown attribute 'output_byte'; did you mean output_b"),
        ({"cost_s": 1e-3}, {}, r"op 'b': cost_s is 0.001, not \{device kind: seconds\}"),
        ({"flops": 0.5}, {}, "op 'b': flops is 0.5, not within"),
        ({}, {"weight": 3}, "edge 'a' -> 'b': unknown attribute 'weight'"),
    ],
)
def test_hand_made_graph_that_breaks_the_schema_is_not_completed(
    node: dict[str, Any], edge: dict[str, Any], message: str
) -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("a", cost_s={"*": 1.0})
    graph.add_node("b", **{"cost_s": {"*": 1.0}, **node})
    graph.add_edge("a", "b", **edge)
    with pytest.raises(ValueError, match=message):
        completed(graph)


@pytest.mark.parametrize(
    ("op_id", "attributes", "message"),
    [
        ("", {}, "op '': an id must be printable"),
        ("a\nb", {}, r"op 'a\\nb': an id must be printable"),
        ("a", {}, "op 'a' is there already"),
        ("x", {"phase": "sideways"}, "op 'x': phase is 'sideways', not one of forward, backward"),
        ("x", {"cost_s": {"cpu": -1e-9}}, r"op 'x': cost_s\['cpu'\] is -1e-09, not a time >= 0"),
        ("x", {"cost_s": {"cpu": float("nan")}}, r"op 'x': cost_s\['cpu'\] is nan"),
        ("x", {"cost_s": {"cpu": float("inf")}}, r"op 'x': cost_s\['cpu'\] is inf"),
        ("x", {"saved_bytes": -1}, r"op 'x': saved_bytes is -1, not within 0 \.\. 2\*\*60"),
        ("x", {"flops": 2**60 + 1}, "op 'x': flops is 1152921504606846977, not within"),
        ("x", {"cost_source": {"gpu": ""}}, "op 'x': cost_source names 'gpu', which has no"),
        (
            "x",
            {"loaded_cost_s": {"gpu": 1.0}},
            r"op 'x': loaded_cost_s\['gpu'\] is 1.0, not a time",
        ),
        (
            "x",
            {"cost_s": {"cpu": 2.0}, "loaded_cost_s": {"cpu": 1.0}},
            r"op 'x': loaded_cost_s\['cpu'\] is 1.0, not a time >= cost_s\['cpu'\]",
        ),
        (
            "x",
            {"launch_s": {"gpu": 1.0}},
            r"op 'x': launch_s\['gpu'\] is 1.0, not a time >= 0 of a",
        ),
        ("x", {"launch_s": {"*": -1.0}}, r"op 'x': launch_s\['\*'\] is -1.0, not a time >= 0"),
        ("x", {"module": "\x1b"}, r"op 'x': module is '\\x1b', which cannot be printed"),
        ("x", {"devices": ()}, "op 'x': the list of allowed devices is empty"),
    ],
)
def test_bad_op_is_refused_and_not_added(
    op_id: str, attributes: dict[str, Any], message: str
) -> None:
    graph = diamond()
    with pytest.raises(ValueError, match=message):
        add_op(graph, op_id, **{"cost_s": {}, **attributes})
    assert graph_hash(graph) == graph_hash(diamond())


@pytest.mark.parametrize(
    ("source", "target", "moved", "message"),
    [
        ("a", "z", None, "edge 'a' -> 'z': there is no op 'z'"),
        ("z", "a", None, "edge 'z' -> 'a': there is no op 'z'"),
        ("a", "a", None, "op 'a' cannot read its own output"),
        ("a", "b", 3, "edge 'a' -> 'b' is there already"),
        ("a", "d", 2**61, "edge 'a' -> 'd': bytes is"),
        ("a", "d", -3, r"edge 'a' -> 'd': bytes is -3, not within 0 \.\. 2\*\*60"),
    ],
)
def test_bad_edge_is_refused_and_not_added(
    source: str, target: str, moved: int | None, message: str
) -> None:
    graph = diamond()
    with pytest.raises(ValueError, match=message):
        add_edge(graph, source, target, moved)
    assert graph_hash(graph) == graph_hash(diamond())
