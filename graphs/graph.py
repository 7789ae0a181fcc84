"""The computation graph of one step: a documented schema over networkx, and flat arrays.

A graph is an ``nx.DiGraph``. A node is an op; its key is a stable string, and its attributes are
those of :class:`OpAttributes`. Every edge has ``bytes``: the part of its source's output that its
target needs. ``graph.graph`` holds ``name``, ``cost_source`` ({device kind: source of costs};
ops may have their own) and, with costs of workers, ``hand_over_s``, the time of a step beside ops.

Hot paths use :class:`GraphArrays`, made once per graph and read-only, and never networkx. Op ``i``
is the ``i``-th node in insertion order, everywhere; ties between ops are broken by this index.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_type_hints,
)

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.text import check_printable, suggestion

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


class OpAttributes(TypedDict, total=False):
    """Attributes of a node with their defaults; all are present once :func:`add_op` has added it.

    This is the only list of them: checks, columns of :class:`GraphArrays` and keys of graph files
    derive from it.
    """

    op: Annotated[str, ""]  # name of the operation, such as "convolution"; default: the id
    cost_s: Required[Mapping[str, float]]  # {device kind or "*": seconds}
    cost_source: Annotated[Mapping[str, str], {}]  # {same keys: source}, if not the graph's
    loaded_cost_s: Annotated[Mapping[str, float], {}]  # {same keys: seconds beside busy devices}
    launch_s: Annotated[Mapping[str, float], {}]  # {same keys: seconds that a thread issues it}
    phase: Annotated[Phase, "forward"]
    module: Annotated[str, ""]  # path of the owning module, "" for the model itself
    flops: Annotated[int, 0]
    moved_bytes: Annotated[int, 0]  # inputs read + outputs written
    output_bytes: Annotated[int, 0]  # without gradients of parameters, see gradient_bytes
    parameter_bytes: Annotated[int, 0]  # parameters, buffers, constants that live with this op
    gradient_bytes: Annotated[int, 0]  # gradients of these parameters
    optimizer_bytes: Annotated[int, 0]  # optimizer state of these parameters
    saved_bytes: Annotated[int, 0]  # part of the output that backward needs
    workspace_bytes: Annotated[int, 0]  # scratch memory while it runs
    colocate: Annotated[str | None, None]  # ops with the same group id share a device
    devices: Annotated[tuple[str, ...] | None, None]  # the only devices allowed, None: all


ATTRIBUTES: Final[Mapping[str, Any]] = get_type_hints(OpAttributes)
"""Type of each attribute of an op."""
DEFAULTS: Final[Mapping[str, Any]] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(OpAttributes, include_extras=True).items()
    if name != "cost_s"
}
"""Defaults of all attributes but ``cost_s``, which is required."""
SIZES: Final = tuple(name for name, kind in ATTRIBUTES.items() if kind is int)
"""The attributes that are counts or bytes, each a column of :class:`GraphArrays`."""
BY_KIND: Final = ("cost_s", "loaded_cost_s", "launch_s")
"""The attributes that are seconds by device kind, each with a column for every kind."""


def add_op(graph: nx.DiGraph[str], op_id: str, **attributes: Unpack[OpAttributes]) -> None:
    """Check the attributes of an op, add defaults for those not given, and add the op.

    An attribute that breaks the schema is a ValueError whose message starts with the op's id.
    """
    if op_id in graph:
        raise ValueError(f"op {op_id!r} is there already; ids must be unique")
    node = {**DEFAULTS, **attributes}
    if fault := _op_fault(op_id, node):
        raise ValueError(f"op {op_id!r}: {fault}")
    node |= {name: int(node[name]) for name in SIZES}
    node["op"] = node["op"] or op_id
    for name in BY_KIND:
        node[name] = {kind: float(seconds) for kind, seconds in node[name].items()}
    node["cost_source"] = dict(node["cost_source"])
    graph.add_node(op_id, **node)


def _op_fault(op_id: str, node: Mapping[str, Any]) -> str | None:
    """Return the first violation of the schema by an op, None for none."""
    if not (isinstance(op_id, str) and op_id and op_id.isprintable()):
        return "an id must be printable text, not empty"
    if node.keys() != ATTRIBUTES.keys():
        for name in node.keys() - ATTRIBUTES.keys():
            return f"unknown attribute {name!r}{suggestion(name, ATTRIBUTES)}"
        return f"lacks {', '.join(sorted(ATTRIBUTES.keys() - node.keys()))}"
    for name in ("op", "module", "colocate"):
        if not (node[name] or "").isprintable():
            check_printable(node[name], f"op {op_id!r}: {name}")
    if node["phase"] not in PHASES:
        return f"phase is {node['phase']!r}, not one of {', '.join(PHASES)}"
    if not isinstance(node["cost_s"], Mapping):
        return f"cost_s is {node['cost_s']!r}, not {{device kind: seconds}}"
    for kind, seconds in node["cost_s"].items():
        if not 0 <= seconds < math.inf:
            return f"cost_s[{kind!r}] is {seconds}, not a time >= 0"
    for kind, seconds in node["loaded_cost_s"].items():
        if not node["cost_s"].get(kind, math.inf) <= seconds < math.inf:
            return f"loaded_cost_s[{kind!r}] is {seconds}, not a time >= cost_s[{kind!r}]"
    for kind, seconds in node["launch_s"].items():
        if kind not in node["cost_s"] or not 0 <= seconds < math.inf:
            return f"launch_s[{kind!r}] is {seconds}, not a time >= 0 of a kind with cost_s"
    for kind in node["cost_source"]:
        if kind not in node["cost_s"]:
            return f"cost_source names {kind!r}, which has no cost_s"
    for name in SIZES:
        if not _is_size(node[name]):
            return f"{name} is {node[name]}, not within 0 .. 2**60"
    if node["devices"] is not None and not node["devices"]:
        return "the list of allowed devices is empty"
    return None


def _is_size(value: int) -> bool:
    return 0 <= value <= LARGEST_BYTES and value == int(value)


def add_edge(graph: nx.DiGraph[str], source: str, target: str, moved: int | None = None) -> None:
    """Add an edge: ``target`` reads ``moved`` bytes of ``source``'s output (default: all of it)."""
    if source not in graph or target not in graph:
        end = target if source in graph else source
        raise ValueError(f"edge {source!r} -> {target!r}: there is no op {end!r}")
    if source == target:
        raise ValueError(f"op {source!r} cannot read its own output")
    if graph.has_edge(source, target):
        raise ValueError(f"edge {source!r} -> {target!r} is there already; add its bytes up")
    size = attributes_of(graph, source)["output_bytes"] if moved is None else moved
    _check_edge(source, target, size)
    graph.add_edge(source, target, bytes=int(size))


def _check_edge(source: str, target: str, size: int) -> None:
    if not _is_size(size):
        raise ValueError(f"edge {source!r} -> {target!r}: bytes is {size}, not within 0 .. 2**60")


def attributes_of(graph: nx.DiGraph[str], op_id: str) -> OpAttributes:
    """Return the attributes of one op."""
    return cast(OpAttributes, graph.nodes[op_id])


def new_graph(
    name: str, cost_source: Mapping[str, str] | None = None, hand_over_s: float = 0.0
) -> nx.DiGraph[str]:
    """Return an empty graph with the graph-level attributes of the schema."""
    return nx.DiGraph(name=name, cost_source=dict(cost_source or {}), hand_over_s=hand_over_s)


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
    hand_over_s: float = 0.0  # of a step to the workers that run it, and of its results back
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
    loaded_cost_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # as cost_s
    launch_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # as cost_s

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
        """Convert a networkx graph to arrays."""
        name = str(graph.graph.get("name", ""))
        if len(graph) == 0:
            raise ValueError(f"graph {name!r} has no ops")
        _check_schema(graph)
        index = {op_id: i for i, op_id in enumerate(graph)}
        nodes: list[dict[str, Any]] = [node for _, node in graph.nodes(data=True)]
        source = np.array([index[op_id] for op_id, _ in graph.edges], np.int32)
        target = np.array([index[op_id] for _, op_id in graph.edges], np.int32)
        edge_bytes = np.array([edge["bytes"] for *_, edge in graph.edges(data=True)], np.int64)
        groups: dict[str, int] = {}
        group = [
            -1 if (g := node["colocate"]) is None else groups.setdefault(g, len(groups))
            for node in nodes
        ]

        def column(values: Iterable[Any], dtype: type[Item]) -> NDArray[Item]:
            return frozen(np.fromiter(values, dtype, len(nodes)))

        def by_kind(name: str) -> dict[str, NDArray[np.float64]]:
            return {
                kind: column((node[name].get(kind, math.nan) for node in nodes), np.float64)
                for kind in sorted({kind for node in nodes for kind in node[name]})
            }

        sizes: dict[str, Any] = {n: column((node[n] for node in nodes), np.int64) for n in SIZES}
        sizes |= {name: by_kind(name) for name in BY_KIND}
        return cls(
            name=name,
            hash=graph_hash(graph),
            hand_over_s=float(graph.graph.get("hand_over_s", 0.0)),
            ids=tuple(graph),
            ops=tuple(node["op"] for node in nodes),
            modules=tuple(node["module"] for node in nodes),
            phase=column((PHASES.index(node["phase"]) for node in nodes), np.int8),
            group=column(group, np.int32),
            allowed=tuple(node["devices"] for node in nodes),
            topological=column((index[op_id] for op_id in topological_order(graph)), np.int32),
            **sizes,
            **adjacency(source, target, edge_bytes, len(nodes)),
        )

    def costs_for(self, kind: str) -> NDArray[np.float64]:
        """Return the seconds of every op on a device kind, (N,); nan where they are unknown."""
        fallback = self.cost_s.get(ANY_KIND)
        named = self.cost_s.get(kind)
        if named is None:
            return fallback if fallback is not None else np.full(len(self), np.nan)
        return named if fallback is None else np.where(np.isnan(named), fallback, named)

    def loaded_costs_for(self, kind: str) -> NDArray[np.float64]:
        """Return the seconds of every op beside busy devices, (N,); nan where they are unknown."""
        return self._beside_cost(self.loaded_cost_s, kind)

    def launches_for(self, kind: str) -> NDArray[np.float64]:
        """Return the seconds in which a thread issues every op, (N,); nan where unknown."""
        return self._beside_cost(self.launch_s, kind)

    def _beside_cost(
        self, seconds: Mapping[str, NDArray[np.float64]], kind: str
    ) -> NDArray[np.float64]:
        """Return what belongs to the costs that :meth:`costs_for` takes: of the kind, or of any."""
        unknown = np.full(len(self), math.nan)
        named = ~np.isnan(self.cost_s.get(kind, unknown))
        return np.where(named, *(seconds.get(key, unknown) for key in (kind, ANY_KIND)))


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
    for op_id, node in graph.nodes(data=True):
        if fault := _op_fault(op_id, node):
            raise ValueError(f"op {op_id!r}: {fault}")
    for source, target, edge in graph.edges(data=True):
        if "bytes" not in edge:
            raise ValueError(f"edge {source!r} -> {target!r} lacks bytes: add edges with add_edge")
        _check_edge(source, target, edge["bytes"])


def adjacency(
    source: NDArray[np.integer[Any]],
    target: NDArray[np.integer[Any]],
    edge_bytes: NDArray[np.int64],
    count: int,
) -> dict[str, Any]:
    """Return the arrays of :class:`GraphArrays` that describe edges, by name."""
    start, successors, order = csr(source, target, count)
    predecessor_start, predecessors, predecessor_edge = csr(successors, source[order], count)
    arrays: dict[str, NDArray[Any]] = {
        "successor_start": start,
        "successors": successors,
        "edge_bytes": edge_bytes[order],
        "predecessor_start": predecessor_start,
        "predecessors": predecessors,
        "predecessor_edge": predecessor_edge,
    }
    return {name: frozen(array) for name, array in arrays.items()}


def csr(
    rows: NDArray[np.integer[Any]], columns: NDArray[np.integer[Any]], count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return row starts (count+1), columns sorted by row and column, and the permutation."""
    order = np.lexsort((columns, rows)).astype(np.int32)
    start = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=start[1:])
    return start, columns[order].astype(np.int32), order


def topological_order(graph: nx.DiGraph[str]) -> list[str]:
    """Return all ops in topological order; of those that could come next, the one added first.

    A cycle is a ValueError that shows it.
    """
    ids = list(graph)
    index = {op_id: i for i, op_id in enumerate(ids)}
    readers = [[index[op_id] for op_id in reading] for _, reading in graph.adjacency()]
    missing = [degree for _, degree in graph.in_degree()]
    ready = [i for i, count in enumerate(missing) if not count]
    order: list[str] = []
    while ready:
        done = heappop(ready)
        order.append(ids[done])
        for i in readers[done]:
            missing[i] -= 1
            if not missing[i]:
                heappush(ready, i)
    if len(order) < len(ids):
        cycle = [source for source, *_ in nx.find_cycle(graph)]
        shown = " -> ".join([*cycle[:6], "..."] if len(cycle) > 6 else [*cycle, cycle[0]])
        raise ValueError(f"the graph has a cycle of {len(cycle)} ops: {shown}")
    return order
