"""Graph files: JSON that other tools write too, read strictly.

::

    {"format": "placer-graph/1", "name": "two ops",
     "nodes": [{"id": "a", "cost_s": {"cuda": 1e-3, "*": 2e-3}, "output_bytes": 4096},
               {"id": "b", "cost_s": {"*": 1e-3}}],
     "edges": [{"source": "a", "target": "b", "bytes": 4096}]}

Of a node only ``id`` and ``cost_s`` are required; the rest is as in
:class:`graphs.graph.OpAttributes`. An edge's ``bytes`` default to its source's ``output_bytes``.
A graph may have a ``cost_source`` ({device kind: source of its costs}); a node's own
``cost_source`` overrides it for that op.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import networkx as nx

from graphs.files import write_whole
from graphs.graph import (
    OpAttributes,
    add_edge,
    add_op,
    attributes_of,
    new_graph,
)
from graphs.order import topological_order
from graphs.printable import check_printable
from graphs.strict_json import array, fields, load_checked, number, table, text, whole

FORMAT: Final = "placer-graph/1"

_SIZES: Final = (
    "flops",
    "moved_bytes",
    "output_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "saved_bytes",
    "workspace_bytes",
)
_TEXTS: Final = ("op", "phase", "module")
_GRAPH_KEYS: Final = frozenset({"format", "name", "cost_source", "nodes", "edges"})
_NODE_KEYS: Final = frozenset(OpAttributes.__required_keys__) | {"id"}
_EDGE_KEYS: Final = frozenset({"source", "target", "bytes"})


def load_graph(path: Path) -> nx.DiGraph[str]:
    """Read a graph file.

    Raises:
        ValueError: it is not JSON or not a graph; the message starts with the file and the path of
            the fault in it, such as ``nodes[3].output_bytes``.
        OSError: it cannot be read.
    """
    return load_checked(path, graph_from_dict)


def save_graph(graph: nx.DiGraph[str], path: Path) -> None:
    """Write a graph file atomically, one op or edge per line.

    Raises:
        ValueError: the graph is not valid, or has texts that cannot be printed.
        OSError: the file cannot be written.
    """
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

    Raises:
        ValueError: the graph has a cycle.
    """
    topological_order(graph)
    data: dict[str, Any] = {"format": FORMAT, "name": str(graph.graph.get("name", ""))}
    if sources := graph.graph.get("cost_source"):
        data["cost_source"] = dict(sources)
    data["nodes"] = [_node_to_dict(op_id, attributes_of(graph, op_id)) for op_id in graph]
    data["edges"] = [
        {"source": source, "target": target, "bytes": int(edge["bytes"])}
        for source, target, edge in graph.edges(data=True)
    ]
    return data


def graph_from_dict(data: object) -> nx.DiGraph[str]:
    """Build a graph from the parsed content of a graph file.

    Raises:
        ValueError: unknown, missing or repeated keys, values of a wrong type or out of range, two
            ops with the same id, an edge without its ops, or a cycle. The message says where.
    """
    top = fields(data, "", _GRAPH_KEYS, required=("format", "nodes"))
    if top["format"] != FORMAT:
        shown = reprlib.repr(top["format"])
        raise ValueError(f"format is {shown}, this version reads {FORMAT!r}")
    graph = new_graph(text(top.get("name", ""), "name"), _sources(top, "cost_source"))
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
    data: dict[str, Any] = {"id": op_id}
    if node["op"] != op_id:
        data["op"] = node["op"]
    data["cost_s"] = {kind: float(seconds) for kind, seconds in node["cost_s"].items()}
    if node["cost_source"]:
        data["cost_source"] = dict(node["cost_source"])
    if node["phase"] != "forward":
        data["phase"] = node["phase"]
    if node["module"]:
        data["module"] = node["module"]
    sizes: Mapping[str, Any] = node
    data |= {name: int(sizes[name]) for name in _SIZES if sizes[name]}
    if node["colocate"] is not None:
        data["colocate"] = node["colocate"]
    if node["devices"] is not None:
        data["devices"] = list(node["devices"])
    return data


def _read_node(graph: nx.DiGraph[str], item: object, where: str) -> None:
    node = fields(item, where, _NODE_KEYS, required=("id", "cost_s"))
    costs = table(node["cost_s"], f"{where}.cost_s")
    # Error paths are formatted for unusual types only: that takes longer than the check.
    given: dict[str, Any] = {
        "cost_s": {
            kind: s if type(s) is float else number(s, f"{where}.cost_s[{kind!r}]")
            for kind, s in costs.items()
        }
    }
    if "cost_source" in node:
        given["cost_source"] = _sources(node, f"{where}.cost_source")
    for key in _TEXTS:
        if key in node:
            value = node[key]
            given[key] = value if type(value) is str else text(value, f"{where}.{key}")
    for key in _SIZES:
        if key in node:
            value = node[key]
            given[key] = value if type(value) is int else whole(value, f"{where}.{key}")
    if node.get("colocate") is not None:
        given["colocate"] = text(node["colocate"], f"{where}.colocate")
    if node.get("devices") is not None:
        names = array(node["devices"], f"{where}.devices")
        given["devices"] = tuple(
            text(name, f"{where}.devices[{i}]") for i, name in enumerate(names)
        )
    op_id = text(node["id"], f"{where}.id")
    try:
        add_op(graph, op_id, **given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _sources(item: Mapping[str, Any], where: str) -> dict[str, str]:
    sources = table(item.get("cost_source", {}), where)
    return {kind: text(value, f"{where}[{kind!r}]") for kind, value in sources.items()}


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
