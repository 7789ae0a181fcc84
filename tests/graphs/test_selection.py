"""Pins and colocation by name, and what the names match."""

from __future__ import annotations

import networkx as nx
import pytest

from graphs.graph import add_op, attributes_of, new_graph
from graphs.selection import ConstraintError, keep_together, matching, pin


def model() -> nx.DiGraph[str]:
    graph = new_graph("model")
    modules = ("embed", "layers.3", "layers.3.attention", "layers.30", "head")
    for module in modules:
        add_op(graph, f"{module}:mm", cost_s={"*": 1.0}, module=module)
    add_op(graph, ":add", cost_s={"*": 1.0})
    return graph


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("embed", ["embed:mm"]),
        ("embed:mm", ["embed:mm"]),
        (":add", [":add"]),
        ("layers.3", ["layers.3:mm", "layers.3.attention:mm"]),
        ("layers.3.*", ["layers.3:mm", "layers.3.attention:mm"]),
        ("layers.3?", ["layers.30:mm"]),
        ("layers", ["layers.3:mm", "layers.3.attention:mm", "layers.30:mm"]),
        ("*.attention", ["layers.3.attention:mm"]),
    ],
)
def test_a_pattern_is_an_op_a_module_or_a_glob(pattern: str, found: list[str]) -> None:
    assert matching(model(), pattern) == found


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("layers.4.*", "layers.3"),
        ("xyz", "embed, layers, head"),
        ("Embed", "embed"),
    ],
)
def test_what_matches_nothing_is_refused_with_what_was_probably_meant(
    pattern: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        matching(model(), pattern)


def test_pins_limit_the_ops_they_match_and_leave_the_graph_as_it_was() -> None:
    graph = model()
    pinned = pin(graph, {"layers.3": "cuda:0", "head": "cpu"})
    devices = [attributes_of(pinned, op_id)["devices"] for op_id in pinned]
    assert devices == [None, ("cuda:0",), ("cuda:0",), None, ("cpu",), None]
    assert all(attributes_of(graph, op_id)["devices"] is None for op_id in graph)


def test_pins_that_contradict_each_other_or_the_graph_are_refused() -> None:
    with pytest.raises(ValueError, match=r"to a by 'layers' and to b by 'layers\.30'"):
        pin(model(), {"layers": "a", "layers.30": "b"})
    graph = model()
    graph.nodes["head:mm"]["devices"] = ("a", "b")
    assert attributes_of(pin(graph, {"head": "b"}), "head:mm")["devices"] == ("b",)
    with pytest.raises(ValueError, match="cannot be pinned to c: the graph allows only a, b"):
        pin(graph, {"head": "c"})


def test_pins_that_part_a_group_are_refused_with_its_name_and_why() -> None:
    graph = model()
    graph.nodes["embed:mm"]["colocate"] = graph.nodes["head:mm"]["colocate"] = "parameter e.weight"
    with pytest.raises(
        ConstraintError,
        match=r"'embed' is pinned to a and 'head' to b, but .* 'parameter e\.weight', .* one home",
    ):
        pin(graph, {"embed": "a", "layers": "b", "head": "b"})
    assert attributes_of(pin(graph, {"embed": "a", "head": "a"}), "head:mm")["devices"] == ("a",)
    kept = keep_together(graph, ["layers"])
    with pytest.raises(
        ConstraintError, match=r"'layers\.3\.attention' to b, but .*the user keeps them together"
    ):
        pin(kept, {"layers.3:mm": "a", "layers.3.attention": "b"})


def test_patterns_that_overlap_and_groups_that_they_touch_become_one_group() -> None:
    graph = model()
    graph.nodes["embed:mm"]["colocate"] = graph.nodes["head:mm"]["colocate"] = "tied"
    kept = keep_together(graph, ["embed", "layers.30", "layers"])
    label = {op_id: attributes_of(kept, op_id)["colocate"] for op_id in kept}
    assert label["embed:mm"] == label["head:mm"]
    assert label["layers.3:mm"] == label["layers.30:mm"] == label["layers.3.attention:mm"]
    assert len({label["embed:mm"], label["layers.3:mm"], label[":add"]}) == 3
    assert label[":add"] is None
    assert attributes_of(graph, "layers.3:mm")["colocate"] is None
