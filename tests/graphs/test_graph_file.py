"""Graph files: round trip, and refusals that name the place of the error."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.coarsen.groups import coarsen
from graphs.graph import DEFAULTS, PHASES, SIZES, GraphArrays, add_edge, add_op, new_graph
from graphs.graph_file import FORMAT, completed, graph_from_dict, load_graph, save_graph

PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
TEXT = st.text(PRINTABLE, max_size=8)
IDS = st.text(PRINTABLE, min_size=1, max_size=8)
SIZE_VALUES = st.integers(0, 2**60)
COSTS = st.dictionaries(
    st.sampled_from(["cuda", "cpu", "core", "*"]),
    st.floats(0, 1e3, allow_nan=False, allow_subnormal=True),
    max_size=3,
)


@st.composite
def graphs(draw: st.DrawFn) -> nx.DiGraph[str]:
    graph = new_graph(draw(TEXT), draw(st.dictionaries(TEXT, TEXT, max_size=2)))
    ids = draw(st.lists(IDS, unique=True, max_size=6))
    for op_id in ids:
        sizes: Any = {name: draw(SIZE_VALUES) for name in SIZES}
        add_op(
            graph,
            op_id,
            cost_s=(cost_s := draw(COSTS)),
            loaded_cost_s={
                kind: 1.5 * cost_s[kind] for kind in sorted(cost_s)[: draw(st.integers(0, 3))]
            },
            cost_source=draw(st.fixed_dictionaries({}, optional=dict.fromkeys(cost_s, TEXT))),
            op=draw(TEXT),
            phase=draw(st.sampled_from(PHASES)),
            module=draw(TEXT),
            colocate=draw(st.none() | TEXT),
            devices=draw(st.none() | st.lists(TEXT, min_size=1, max_size=2).map(tuple)),
            **sizes,
        )
    order = draw(st.permutations(ids))
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    for source, target in draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []:
        add_edge(graph, source, target, draw(st.none() | SIZE_VALUES))
    return graph


def small(**changes: Any) -> dict[str, Any]:
    """Return a valid file of a -> b -> c with changed top-level keys."""
    return {
        "format": FORMAT,
        "name": "small",
        "nodes": [{"id": name, "cost_s": {"*": 1e-3}, "output_bytes": 8} for name in "abc"],
        "edges": [{"source": "a", "target": "b"}, {"source": "b", "target": "c", "bytes": 3}],
    } | changes


def node(**changes: Any) -> dict[str, Any]:
    """Return a file whose second node is changed."""
    whole = small()
    whole["nodes"][1] |= changes
    return whole


def edge(**changes: Any) -> dict[str, Any]:
    """Return a file whose second edge is changed."""
    whole = small()
    whole["edges"][1] |= changes
    return whole


def test_edge_bytes_default_to_the_output_of_the_source() -> None:
    graph = graph_from_dict(small())
    assert graph.edges["a", "b"]["bytes"] == 8
    assert graph.edges["b", "c"]["bytes"] == 3


def test_only_id_and_costs_are_required() -> None:
    graph = graph_from_dict({"format": FORMAT, "nodes": [{"id": "a", "cost_s": {}}]})
    assert dict(graph.nodes["a"]) == {**DEFAULTS, "op": "a", "cost_s": {}}
    assert (DEFAULTS["phase"], DEFAULTS["devices"], DEFAULTS["flops"]) == ("forward", None, 0)


@settings(max_examples=60)
@given(graphs())
def test_graph_survives_the_round_trip_through_a_file(
    tmp_path_factory: pytest.TempPathFactory, graph: nx.DiGraph[str]
) -> None:
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    save_graph(graph, path)
    again = load_graph(path)
    assert list(again.nodes(data=True)) == list(graph.nodes(data=True))
    assert set(again.edges(data="bytes")) == set(graph.edges(data="bytes"))
    assert again.graph == graph.graph


def test_the_time_of_handing_a_step_over_is_kept(tmp_path: Path) -> None:
    graph = graph_from_dict(small(hand_over_s=3e-4))
    save_graph(graph, tmp_path / "graph.json")
    loaded, coarse = load_graph(tmp_path / "graph.json"), coarsen(graph, most_groups=2).graph
    for kept in (loaded, completed(graph), coarse):
        assert GraphArrays.from_graph(kept).hand_over_s == 3e-4


def test_saved_file_has_one_op_or_edge_per_line(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(graph_from_dict(small()), path)
    lines = path.read_text().splitlines()
    assert sum('"id"' in line for line in lines) == 3
    assert sum('"source"' in line for line in lines) == 2
    assert max(line.count('"id"') + line.count('"source"') for line in lines) == 1


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(graph_from_dict(small()), path)
    before = path.read_text()
    looped = graph_from_dict(small())
    add_edge(looped, "c", "a")
    with pytest.raises(ValueError, match="cycle of 3 ops"):
        save_graph(looped, path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"the file is \[\], not an object"),
        ({"format": FORMAT}, "the file lacks nodes"),
        (small(format="placer-graph/2"), "format is 'placer-graph/2', this version reads"),
        (small(nodse=[]), "unknown key nodse; did you mean nodes?"),
        (small(nodes={}), r"nodes is \{\}, not a list"),
        (small(nodes=[3]), r"nodes\[0\] is 3, not an object"),
        (small(nodes=[{"id": "a"}]), r"nodes\[0\] lacks cost_s"),
        (small(hand_over_s="1"), "hand_over_s is '1', not a number"),
        (small(hand_over_s=-1), "hand_over_s is -1.0, not a time >= 0"),
        (small(cost_source={"cuda": 1}), r"cost_source\['cuda'\] is 1, not a string"),
        (node(outputbytes=3), r"unknown key nodes\[1\]\.outputbytes; did you mean output_bytes"),
        (node(id="a"), r"nodes\[1\]: op 'a' is there already"),
        (node(id="x\0y"), r"nodes\[1\]\.id is 'x\\x00y', which cannot be printed"),
        (node(id=7), r"nodes\[1\]\.id is 7, not a string"),
        (node(cost_s=1.0), r"nodes\[1\]\.cost_s is 1.0, not an object"),
        (node(cost_source={"*": 1}), r"nodes\[1\]\.cost_source\['\*'\] is 1, not a string"),
        (node(cost_s={"*": -1}), r"nodes\[1\]: op 'b': cost_s\['\*'\] is -1.0, not a time >= 0"),
        (node(cost_s={"*": True}), r"nodes\[1\]\.cost_s\['\*'\] is True, not a number"),
        (node(cost_s={"*": 10**400}), r"nodes\[1\]\.cost_s\['\*'\] is too large a number"),
        (node(output_bytes=1.5), r"nodes\[1\]\.output_bytes is 1.5, not a whole number"),
        (node(output_bytes="8"), r"nodes\[1\]\.output_bytes is '8', not a number"),
        (node(devices=["cpu", 1]), r"nodes\[1\]\.devices\[1\] is 1, not a string"),
        (edge(size=3), r"unknown key edges\[1\]\.size"),
        (edge(target="d"), r"edges\[1\]: edge 'b' -> 'd': there is no op 'd'"),
        (edge(target="a"), r"edges: the graph has a cycle of 2 ops: a -> b -> a"),
    ],
)
def test_fault_is_refused_with_its_place(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as refusal:
        load_graph(path)
    assert str(refusal.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("[1, 2], " * 200_000, "no JSON object"),
        ("nothing", "not JSON"),
        (
            f'{{"format": "{FORMAT}", "nodes": [{{"id": "a", "cost_s": {{"*": 1, "*": 2}}}}]}}',
            r"nodes\[0\]\.cost_s\.\* is given twice",
        ),
    ],
)
def test_text_that_is_no_json_object_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_graph(path)


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collecting: bool, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    was = gc.isenabled()
    try:
        for content in (small(), {}):
            path.write_text(json.dumps(content))
            gc.enable() if collecting else gc.disable()
            with contextlib.suppress(ValueError):
                load_graph(path)
            assert gc.isenabled() is collecting
    finally:
        gc.enable() if was else gc.disable()
