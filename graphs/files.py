"""Graph files: JSON that others write too, read strictly.

::

    {"format": "placer-graph/1", "name": "two ops",
     "nodes": [{"id": "a", "cost_s": {"cuda": 1e-3, "*": 2e-3}, "output_bytes": 4096},
               {"id": "b", "cost_s": {"*": 1e-3}}],
     "edges": [{"source": "a", "target": "b", "bytes": 4096}]}

Of a node only ``id`` and ``cost_s`` are required; the rest is as in
:class:`graphs.graph.OpAttributes`. An edge's ``bytes`` default to its source's ``output_bytes``.
Beside ``name``, ``cost_source`` ({device kind: where its costs come from}) may be given.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import networkx as nx

from graphs.graph import (
    OpAttributes,
    add_edge,
    add_op,
    attributes_of,
    new_graph,
    topological_order,
)

FORMAT: Final = "placer-graph/1"
LARGEST_FILE_BYTES: Final = 1 << 29
"""About four million ops; what is larger was hardly meant as a graph."""

_SIZES: Final = (
    "flops",
    "moved_bytes",
    "output_bytes",
    "parameter_bytes",
    "saved_bytes",
    "workspace_bytes",
)
_GRAPH_KEYS: Final = frozenset({"format", "name", "cost_source", "nodes", "edges"})
_NODE_KEYS: Final = frozenset(OpAttributes.__required_keys__) | {"id"}
_EDGE_KEYS: Final = frozenset({"source", "target", "bytes"})


class _Object(dict[str, Any]):
    """A JSON object that remembers a key given twice, until its path is known."""

    repeated: str | None = None

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Object:
        made = cls(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            made.repeated = next(key for i, key in enumerate(keys) if key in keys[:i])
        return made


def load_graph(path: Path) -> nx.DiGraph[str]:
    """Read a graph file.

    Raises:
        ValueError: it is not JSON or not a graph; the message starts with the file and the path of
            the fault in it, such as ``nodes[3].output_bytes``.
        OSError: it cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise ValueError(f"{size / 1e9:.1f} GB is more than a graph file may have (0.5 GB)")
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_Object.of)
        return graph_from_dict(data)
    except RecursionError:
        raise ValueError(f"{path}: the JSON is nested too deeply for a graph file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_graph(graph: nx.DiGraph[str], path: Path) -> None:
    """Write a graph file, one op or edge per line; it is complete or absent, never half-written.

    Raises:
        ValueError: the graph is not a valid one.
        OSError: it cannot be written.
    """
    data = graph_to_dict(graph)
    rows = {name: data.pop(name) for name in ("nodes", "edges")}
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    for name, items in rows.items():
        lines = ",\n  ".join(json.dumps(item, allow_nan=False) for item in items)
        fields.append(f'"{name}": [\n  {lines}\n ]' if items else f'"{name}": []')
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("{" + ",\n ".join(fields) + "}\n", encoding="utf-8")
    partial.replace(path)


def graph_to_dict(graph: nx.DiGraph[str]) -> dict[str, Any]:
    """The content of a graph file; :func:`graph_from_dict` gives the same graph back.

    Attributes at their defaults are left out, edges always say their bytes.

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
    """A graph from the parsed content of a graph file: all of it, or none.

    Raises:
        ValueError: unknown, missing or repeated keys, values of a wrong type or out of range, two
            ops of one id, an edge without its ops, or a cycle. The message says where.
    """
    top = _object(data, "", _GRAPH_KEYS, required=("format", "nodes"))
    if top["format"] != FORMAT:
        shown = reprlib.repr(top["format"])
        raise ValueError(f"format is {shown}, this version reads {FORMAT!r}")
    sources = _table(top.get("cost_source", {}), "cost_source")
    graph = new_graph(
        _text(top.get("name", ""), "name"),
        {kind: _text(value, f"cost_source[{kind!r}]") for kind, value in sources.items()},
    )
    for i, item in enumerate(_array(top["nodes"], "nodes")):
        _read_node(graph, item, f"nodes[{i}]")
    for i, item in enumerate(_array(top.get("edges", []), "edges")):
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
    node = _object(item, where, _NODE_KEYS, required=("id", "cost_s"))
    costs = _table(node["cost_s"], f"{where}.cost_s")
    given: dict[str, Any] = {
        "cost_s": {
            kind: _number(seconds, f"{where}.cost_s[{kind!r}]") for kind, seconds in costs.items()
        }
    }
    for key in ("op", "phase", "module"):
        if key in node:
            given[key] = _text(node[key], f"{where}.{key}")
    for key in _SIZES:
        if key in node:
            given[key] = _whole(node[key], f"{where}.{key}")
    if node.get("colocate") is not None:
        given["colocate"] = _text(node["colocate"], f"{where}.colocate")
    if node.get("devices") is not None:
        names = _array(node["devices"], f"{where}.devices")
        given["devices"] = tuple(
            _text(name, f"{where}.devices[{i}]") for i, name in enumerate(names)
        )
    op_id = _text(node["id"], f"{where}.id")
    try:
        add_op(graph, op_id, **given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_edge(graph: nx.DiGraph[str], item: object, where: str) -> None:
    edge = _object(item, where, _EDGE_KEYS, required=("source", "target"))
    source = _text(edge["source"], f"{where}.source")
    target = _text(edge["target"], f"{where}.target")
    moved = _whole(edge["bytes"], f"{where}.bytes") if "bytes" in edge else None
    try:
        add_edge(graph, source, target, moved)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _object(
    value: object, where: str, known: frozenset[str], required: tuple[str, ...]
) -> dict[str, Any]:
    """A JSON object whose keys are among ``known``, the ``required`` ones present."""
    table = _table(value, where)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown key {_path(where, key[:80])}{hint}")
    if missing := [key for key in required if key not in table]:
        raise ValueError(f"{where or 'the file'} lacks {', '.join(missing)}")
    return table


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the file'} is {reprlib.repr(value)}, not an object")
    if isinstance(value, _Object) and value.repeated is not None:
        raise ValueError(f"{_path(where, value.repeated[:80])} is given twice")
    return value


def _array(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a list")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a string")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where} is too large a number") from None


def _whole(value: object, where: str) -> int:
    number = _number(value, where)
    if not (math.isfinite(number) and number == int(number)):
        raise ValueError(f"{where} is {number}, not a whole number")
    return value if isinstance(value, int) else int(number)


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
