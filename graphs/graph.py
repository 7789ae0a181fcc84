"""The computation graph of one step: a documented schema over networkx, and flat arrays.

A graph is an ``nx.DiGraph``. A node is an op; its key is a stable string, and its attributes are
those of :class:`OpAttributes`. Every edge has ``bytes``: the part of its source's output that its
target needs. ``graph.graph`` holds ``name`` and ``cost_source`` ({device kind: source of its
costs}); ops whose costs come from elsewhere have a ``cost_source`` of their own.

Hot paths use :class:`GraphArrays`, made once per graph and read-only, and never networkx. Op ``i``
is the ``i``-th node in insertion order, everywhere; ties between ops are broken by this index.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, TypeVar, cast

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.order import topological_order
from graphs.printable import check_printable

Item = TypeVar("Item", bound=np.generic)


def frozen(array: NDArray[Item]) -> NDArray[Item]:
    """Return the array, contiguous and read-only; one that is contiguous is changed in place."""
    whole = np.ascontiguousarray(array)
    whole.setflags(write=False)
    return whole


if TYPE_CHECKING:
    Graph: TypeAlias = nx.DiGraph[str]
else:
    Graph = nx.DiGraph
Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "optimizer")
ANY_KIND: Final = "*"
"""Key of ``cost_s`` that stands for every device kind not named."""
LARGEST_BYTES: Final = 1 << 60


class OpAttributes(TypedDict):
    """Attributes of a node, all present once :func:`add_op` has added it."""

    op: str  # name of the operation, such as "convolution"
    phase: Phase
    module: str  # path of the owning module, "" for the model itself
    flops: int
    moved_bytes: int  # inputs read + outputs written
    output_bytes: int  # without gradients of parameters, see gradient_bytes
    parameter_bytes: int  # parameters that live where this op runs
    gradient_bytes: int  # gradients of these parameters
    optimizer_bytes: int  # optimizer state of these parameters
    saved_bytes: int  # part of the output that backward needs
    workspace_bytes: int  # scratch memory while it runs
    colocate: str | None  # ops with the same group id share a device
    devices: tuple[str, ...] | None  # the only devices allowed, None: all
    cost_s: Mapping[str, float]  # {device kind or "*": seconds}
    cost_source: Mapping[str, str]  # {same keys: source}, where it is not the graph's


def add_op(
    graph: nx.DiGraph[str],
    op_id: str,
    *,
    cost_s: Mapping[str, float],
    cost_source: Mapping[str, str] | None = None,
    op: str = "",
    phase: Phase = "forward",
    module: str = "",
    flops: int = 0,
    moved_bytes: int = 0,
    output_bytes: int = 0,
    parameter_bytes: int = 0,
    gradient_bytes: int = 0,
    optimizer_bytes: int = 0,
    saved_bytes: int = 0,
    workspace_bytes: int = 0,
    colocate: str | None = None,
    devices: tuple[str, ...] | None = None,
) -> None:
    """Check the attributes of an op and add it.

    Raises:
        ValueError: the id exists already or is not printable text, a number is negative, not finite
            or too large, ``cost_source`` names a kind without cost, the phase is unknown, the list
            of devices is empty, or a text cannot be printed. The message starts with the op's id.
    """
    if not op_id or not op_id.isprintable():
        raise ValueError(f"op {op_id!r}: an id must be printable text, not empty")
    for what, text in (("op", op), ("module", module), ("colocate", colocate or "")):
        check_printable(text, f"op {op_id!r}: {what}")
    if op_id in graph:
        raise ValueError(f"op {op_id!r} is there already; ids must be unique")
    if phase not in PHASES:
        raise ValueError(f"op {op_id!r}: phase is {phase!r}, not one of {', '.join(PHASES)}")
    _check_costs(cost_s, op_id)
    if unknown := sorted(set(cost_source or {}) - set(cost_s)):
        raise ValueError(f"op {op_id!r}: cost_source names {unknown[0]!r}, which has no cost_s")
    sizes = {
        "flops": flops,
        "moved_bytes": moved_bytes,
        "output_bytes": output_bytes,
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": optimizer_bytes,
        "saved_bytes": saved_bytes,
        "workspace_bytes": workspace_bytes,
    }
    for name, size in sizes.items():
        _check_size(size, f"op {op_id!r}: {name}")
    if devices is not None and not devices:
        raise ValueError(f"op {op_id!r}: the list of allowed devices is empty")
    attributes: OpAttributes = {
        "op": op or op_id,
        "phase": phase,
        "module": module,
        "flops": flops,
        "moved_bytes": moved_bytes,
        "output_bytes": output_bytes,
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": optimizer_bytes,
        "saved_bytes": saved_bytes,
        "workspace_bytes": workspace_bytes,
        "colocate": colocate,
        "devices": devices,
        "cost_s": dict(cost_s),
        "cost_source": dict(cost_source or {}),
    }
    graph.add_node(op_id, **attributes)


def add_edge(graph: nx.DiGraph[str], source: str, target: str, moved: int | None = None) -> None:
    """Add an edge: ``target`` reads ``moved`` bytes of ``source``'s output (default: all of it).

    Raises:
        ValueError: an end is missing, the edge exists or is a loop, or the bytes are out of range.
    """
    if source not in graph or target not in graph:
        end = target if source in graph else source
        raise ValueError(f"edge {source!r} -> {target!r}: there is no op {end!r}")
    if source == target:
        raise ValueError(f"op {source!r} cannot read its own output")
    if graph.has_edge(source, target):
        raise ValueError(f"edge {source!r} -> {target!r} is there already; add its bytes up")
    size = attributes_of(graph, source)["output_bytes"] if moved is None else moved
    _check_size(size, f"edge {source!r} -> {target!r}: bytes")
    graph.add_edge(source, target, bytes=size)


def attributes_of(graph: nx.DiGraph[str], op_id: str) -> OpAttributes:
    """Return the attributes of one op."""
    return cast(OpAttributes, graph.nodes[op_id])


def cost_source(graph: nx.DiGraph[str], op_id: str, kind: str) -> str:
    """Return the source of an op's cost on a device kind, "" if it is unknown.

    As with the costs themselves, ``"*"`` covers the kinds that are not named.
    """
    own = attributes_of(graph, op_id)
    known = kind if kind in own["cost_s"] else ANY_KIND
    of_kind: Mapping[str, str] = graph.graph.get("cost_source", {})
    return own["cost_source"].get(known, of_kind.get(known, ""))


def new_graph(name: str, cost_source: Mapping[str, str] | None = None) -> nx.DiGraph[str]:
    """Return an empty graph with the graph-level attributes of the schema."""
    return nx.DiGraph(name=name, cost_source=dict(cost_source or {}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphArrays:
    """A graph as flat, read-only arrays: N ops, E edges, C co-location groups.

    ``successor_start`` (N+1) and ``successors`` (E) are the CSR form by source, both int32, with
    ascending successors; ``edge_bytes`` (E) int64 is parallel to ``successors``.
    ``predecessor_start`` and ``predecessors`` are the CSR form by target, and ``predecessor_edge``
    (E) holds each edge's index in ``successors``. ``topological`` (N) int32 is a topological order
    of the ops.
    """

    name: str
    hash: str
    ids: tuple[str, ...]
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    phase: NDArray[np.int8]  # index into PHASES
    flops: NDArray[np.int64]
    moved_bytes: NDArray[np.int64]
    output_bytes: NDArray[np.int64]
    parameter_bytes: NDArray[np.int64]
    gradient_bytes: NDArray[np.int64]
    optimizer_bytes: NDArray[np.int64]
    saved_bytes: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    group: NDArray[np.int32]  # dense co-location group, -1 for none
    allowed: tuple[tuple[str, ...] | None, ...]
    cost_s: Mapping[str, NDArray[np.float64]]  # {kind: (N,)}, nan where an op has no such cost
    successor_start: NDArray[np.int32]
    successors: NDArray[np.int32]
    edge_bytes: NDArray[np.int64]
    predecessor_start: NDArray[np.int32]
    predecessors: NDArray[np.int32]
    predecessor_edge: NDArray[np.int32]
    topological: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of ops."""
        return len(self.ids)

    @property
    def edge_count(self) -> int:
        """Number of edges."""
        return len(self.successors)

    @property
    def resident_bytes(self) -> NDArray[np.int64]:
        """Bytes that an op keeps on its device during the whole step, (N,).

        These are its parameters, their gradients and their optimizer state. A gradient is counted
        with its parameter and for the whole step, as if it were kept from step to step;
        ``output_bytes`` of the op that produces it exclude it.
        """
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @classmethod
    def from_graph(cls, graph: nx.DiGraph[str]) -> GraphArrays:
        """Convert a networkx graph to arrays.

        Raises:
            ValueError: the graph is empty, has a cycle (the message shows one), or has a node or an
                edge without the attributes of the schema, or with a number out of range.
        """
        if len(graph) == 0:
            raise ValueError(f"graph {graph.graph.get('name', '')!r} has no ops")
        _check_schema(graph)
        ids = tuple(graph)
        index = {op_id: i for i, op_id in enumerate(ids)}
        nodes = [attributes_of(graph, op_id) for op_id in ids]
        source, target, size = _edges(graph, index)
        start, successors, order = csr(source, target, len(ids))
        edge_bytes = size[order]
        edge_source = source[order]
        predecessor_start, predecessors, predecessor_edge = csr(successors, edge_source, len(ids))
        groups: dict[str, int] = {}
        group = [
            -1 if (g := node["colocate"]) is None else groups.setdefault(g, len(groups))
            for node in nodes
        ]
        kinds = sorted({kind for node in nodes for kind in node["cost_s"]})

        def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
            values = [cast(Mapping[str, Any], node)[name] for node in nodes]
            return frozen(np.array(values, dtype=dtype))

        return cls(
            name=str(graph.graph.get("name", "")),
            hash=graph_hash(graph),
            ids=ids,
            ops=tuple(node["op"] for node in nodes),
            modules=tuple(node["module"] for node in nodes),
            phase=frozen(np.array([PHASES.index(node["phase"]) for node in nodes], np.int8)),
            flops=column("flops", np.int64),
            moved_bytes=column("moved_bytes", np.int64),
            output_bytes=column("output_bytes", np.int64),
            parameter_bytes=column("parameter_bytes", np.int64),
            gradient_bytes=column("gradient_bytes", np.int64),
            optimizer_bytes=column("optimizer_bytes", np.int64),
            saved_bytes=column("saved_bytes", np.int64),
            workspace_bytes=column("workspace_bytes", np.int64),
            group=frozen(np.array(group, np.int32)),
            allowed=tuple(node["devices"] for node in nodes),
            cost_s={
                kind: frozen(
                    np.array([node["cost_s"].get(kind, np.nan) for node in nodes], np.float64)
                )
                for kind in kinds
            },
            successor_start=frozen(start),
            successors=frozen(successors),
            edge_bytes=frozen(edge_bytes),
            predecessor_start=frozen(predecessor_start),
            predecessors=frozen(predecessors),
            predecessor_edge=frozen(predecessor_edge),
            topological=frozen(
                np.array([index[op_id] for op_id in topological_order(graph)], np.int32)
            ),
        )

    def costs_for(self, kind: str) -> NDArray[np.float64]:
        """Return the seconds of every op on a device kind, (N,); nan where they are unknown."""
        fallback = self.cost_s.get(ANY_KIND)
        own = self.cost_s.get(kind)
        if own is None:
            return fallback if fallback is not None else np.full(len(self), np.nan)
        return own if fallback is None else np.where(np.isnan(own), fallback, own)


def graph_hash(graph: nx.DiGraph[str]) -> str:
    """Return the SHA-256 of ids, edges, output and parameter sizes, in insertion order.

    Costs are left out, so that a placement stays valid when costs are measured again. Optimizer ops
    are left out, too: a placement of a step with optimizer also holds for the step without.
    """
    digest = hashlib.sha256(b"placer-graph/1")
    hashed = [op_id for op_id in graph if attributes_of(graph, op_id)["phase"] != "optimizer"]
    for op_id in hashed:
        node = attributes_of(graph, op_id)
        digest.update(f"\0{op_id}\0{node['output_bytes']}\0{node['parameter_bytes']}".encode())
    index = {op_id: i for i, op_id in enumerate(hashed)}
    edges = sorted(
        (index[a], index[b], data["bytes"])
        for a, b, data in graph.edges(data=True)
        if a in index and b in index
    )
    digest.update(repr(edges).encode())
    return digest.hexdigest()


def _check_schema(graph: nx.DiGraph[str]) -> None:
    for op_id, data in graph.nodes(data=True):
        if missing := sorted(OpAttributes.__required_keys__ - data.keys()):
            raise ValueError(f"op {op_id!r} lacks {', '.join(missing)}: add ops with add_op")
        for name, value in data.items():
            if name == "flops" or name.endswith("_bytes"):
                _check_size(value, f"op {op_id!r}: {name}")
        _check_costs(data["cost_s"], op_id)
    for source, target, data in graph.edges(data=True):
        if "bytes" not in data:
            raise ValueError(f"edge {source!r} -> {target!r} lacks bytes: add edges with add_edge")
        _check_size(data["bytes"], f"edge {source!r} -> {target!r}: bytes")


def _check_costs(cost_s: Mapping[str, float], op_id: str) -> None:
    for kind, seconds in cost_s.items():
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"op {op_id!r}: cost_s[{kind!r}] is {seconds}, not a time >= 0")


def _check_size(size: int, what: str) -> None:
    if not 0 <= size <= LARGEST_BYTES:
        raise ValueError(f"{what} is {size}, not within 0 .. 2**60")


def _edges(
    graph: nx.DiGraph[str], index: Mapping[str, int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    edges = [(index[a], index[b], data["bytes"]) for a, b, data in graph.edges(data=True)]
    source = np.array([e[0] for e in edges], np.int32)
    target = np.array([e[1] for e in edges], np.int32)
    return source, target, np.array([e[2] for e in edges], np.int64)


def csr(
    rows: NDArray[np.int32], columns: NDArray[np.int32], count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return row starts (count+1), columns sorted by row and column, and the permutation."""
    order = np.lexsort((columns, rows)).astype(np.int32)
    start = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=start[1:])
    return start, columns[order], order
