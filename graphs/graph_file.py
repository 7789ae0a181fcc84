"""Graph files: JSON that other tools write too, read strictly.

::

    {"format": "placer-graph/1", "name": "two ops",
     "nodes": [{"id": "a", "cost_s": {"cuda": 1e-3, "*": 2e-3}, "output_bytes": 4096},
               {"id": "b", "cost_s": {"*": 1e-3}}],
     "edges": [{"source": "a", "target": "b", "bytes": 4096}]}

Of a node only ``id`` and ``cost_s`` are required; the rest is as in
:class:`graphs.graph.OpAttributes`. An edge's ``bytes`` default to its source's ``output_bytes``.
A graph may have a ``cost_source`` ({device kind: source of its costs}); a node's own
``cost_source`` overrides it for that op. It may have ``hand_over_s``, the time of a step beside its
ops where workers run it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import networkx as nx

from graphs.files import write_whole
from graphs.graph import (
    ATTRIBUTES,
    DEFAULTS,
    OpAttributes,
    Phase,
    add_edge,
    add_op,
    attributes_of,
    new_graph,
    topological_order,
)
from graphs.strict_json import array, fields, load_checked, number, of_format, table, text, whole
from graphs.text import check_printable

FORMAT: Final = "placer-graph/1"

_GRAPH_KEYS: Final = frozenset({"format", "name", "cost_source", "hand_over_s", "nodes", "edges"})
_NODE_KEYS: Final = frozenset(ATTRIBUTES) | {"id"}
_EDGE_KEYS: Final = frozenset({"source", "target", "bytes"})


def completed(graph: nx.DiGraph[str]) -> nx.DiGraph[str]:
    """Return a checked copy of a hand-made graph, with defaults for the attributes it lacks.

    As in graph files, a node needs ``cost_s``, an edge nothing: its ``bytes`` default to the
    ``output_bytes`` of its source. What breaks the schema is a ValueError.
    """
    known = graph.graph
    whole = new_graph(str(known.get("name", "")), known.get("cost_source"), _hand_over_s(known))
    for op_id, node in graph.nodes(data=True):
        add_op(whole, op_id, **node)
    for source, target, edge in graph.edges(data=True):
        if unknown := edge.keys() - {"bytes"}:
            raise ValueError(f"edge {source!r} -> {target!r}: unknown attribute {min(unknown)!r}")
        add_edge(whole, source, target, edge.get("bytes"))
    return whole


def load_graph(path: Path) -> nx.DiGraph[str]:
    """Read a graph file."""
    return load_checked(path, graph_from_dict)


def save_graph(graph: nx.DiGraph[str], path: Path) -> None:
    """Write a graph file atomically, one op or edge per line."""
    data = graph_to_dict(graph)
    check_printable(data)
    rows = {name: data.pop(name) for name in ("nodes", "edges")}
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    for name, items in rows.items():
        lines = ",\n  ".join(json.dumps(item, allow_nan=False) for item in items)
        parts.append(f'"{name}": [\n  {lines}\n ]' if items else f'"{name}": []')
    write_whole(path, "{" + ",\n ".join(parts) + "}\n")


def graph_to_dict(graph: nx.DiGraph[str]) -> dict[str, Any]:
    """Return the content of a graph file; :func:`graph_from_dict` restores the same graph.

    Attributes at their defaults are left out; edges always have ``bytes``.
    """
    topological_order(graph)
    data: dict[str, Any] = {"format": FORMAT, "name": str(graph.graph.get("name", ""))}
    if sources := graph.graph.get("cost_source"):
        data["cost_source"] = dict(sources)
    if hand_over_s := graph.graph.get("hand_over_s"):
        data["hand_over_s"] = hand_over_s
    data["nodes"] = [_node_to_dict(op_id, attributes_of(graph, op_id)) for op_id in graph]
    data["edges"] = [
        {"source": source, "target": target, "bytes": int(edge["bytes"])}
        for source, target, edge in graph.edges(data=True)
    ]
    return data


def graph_from_dict(data: object) -> nx.DiGraph[str]:
    """Build a graph from the parsed content of a graph file."""
    top = of_format(data, FORMAT, _GRAPH_KEYS, required=("nodes",))
    graph = new_graph(
        text(top.get("name", ""), "name"),
        _texts(top.get("cost_source", {}), "cost_source"),
        _hand_over_s(top),
    )
    for i, item in enumerate(array(top["nodes"], "nodes")):
        _read_node(graph, item, f"nodes[{i}]")
    for i, item in enumerate(array(top.get("edges", []), "edges")):
        _read_edge(graph, item, f"edges[{i}]")
    try:
        topological_order(graph)
    except ValueError as error:
        raise ValueError(f"edges: {error}") from None
    return graph


def _node_to_dict(op_id: str, node: OpAttributes) -> dict[str, Any]:
    """Return an op without the attributes that have their defaults."""
    values: Mapping[str, Any] = node
    usual = {**DEFAULTS, "op": op_id, "cost_s": None}
    data = {name: values[name] for name in ATTRIBUTES if values[name] != usual[name]}
    if node["devices"] is not None:
        data["devices"] = list(node["devices"])
    return {"id": op_id, **data}


def _read_node(graph: nx.DiGraph[str], item: object, where: str) -> None:
    node = fields(item, where, _NODE_KEYS, required=("id", "cost_s"))
    op_id = text(node["id"], f"{where}.id")
    # Most values have the right type; their error paths would take longer than the check.
    attributes: Any = {
        name: value
        if type(value) is ATTRIBUTES[name]
        else _READERS[ATTRIBUTES[name]](value, f"{where}.{name}")
        for name, value in node.items()
        if name != "id"
    }
    try:
        add_op(graph, op_id, **attributes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _texts(value: object, where: str) -> dict[str, str]:
    return {key: text(item, f"{where}[{key!r}]") for key, item in table(value, where).items()}


def _seconds(value: object, where: str) -> dict[str, float]:
    return {
        kind: seconds if type(seconds) is float else number(seconds, f"{where}[{kind!r}]")
        for kind, seconds in table(value, where).items()
    }


def _hand_over_s(top: Mapping[str, Any]) -> float:
    seconds = number(top.get("hand_over_s", 0.0), "hand_over_s")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"hand_over_s is {seconds}, not a time >= 0")
    return seconds


def _optional_text(value: object, where: str) -> str | None:
    return None if value is None else text(value, where)


def _optional_names(value: object, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(text(name, f"{where}[{i}]") for i, name in enumerate(array(value, where)))


_READERS: Final[Mapping[Any, Callable[[object, str], Any]]] = {
    str: text,
    int: whole,
    Phase: text,
    str | None: _optional_text,
    tuple[str, ...] | None: _optional_names,
    Mapping[str, str]: _texts,
    Mapping[str, float]: _seconds,
}
"""{type of an attribute: the reader of its values in a file}."""


def _read_edge(graph: nx.DiGraph[str], item: object, where: str) -> None:
    edge = fields(item, where, _EDGE_KEYS, required=("source", "target"))
    source, target, moved = edge["source"], edge["target"], edge.get("bytes")
    if type(source) is not str or type(target) is not str:
        source, target = text(source, f"{where}.source"), text(target, f"{where}.target")
    if type(moved) is not int and "bytes" in edge:
        moved = whole(moved, f"{where}.bytes")
    try:
        add_edge(graph, source, target, moved)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
