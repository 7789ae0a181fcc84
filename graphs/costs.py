"""Costs of the ops of a graph: of further device kinds, under load, of part of a batch, in sum."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.graph import ANY_KIND, PHASES, GraphArrays, attributes_of


def cost_source(graph: nx.DiGraph[str], op_id: str, kind: str) -> str:
    """Return the source of an op's cost on a device kind, "" if it is unknown.

    As with the costs themselves, ``"*"`` covers the kinds that are not named.
    """
    node = attributes_of(graph, op_id)
    known = kind if kind in node["cost_s"] else ANY_KIND
    of_kind: Mapping[str, str] = graph.graph.get("cost_source", {})
    return node["cost_source"].get(known, of_kind.get(known, ""))


def with_costs(
    graph: nx.DiGraph[str],
    costs_s: Mapping[str, NDArray[np.float64]],
    sources: Mapping[str, str | Sequence[str]],
    loaded_s: Mapping[str, NDArray[np.float64]] | None = None,
    launches_s: Mapping[str, NDArray[np.float64]] | None = None,
) -> nx.DiGraph[str]:
    """Return a copy of a graph with the costs of further device kinds, {kind: (N,)} in node order.

    Where a cost is nan, the op's costs stay as they were. ``sources`` gives the source of each
    kind's costs, one text for all ops or one per op: the most frequent one becomes that of the
    kind, ops with another carry their own. ``loaded_s`` gives the costs beside busy devices, none
    below the cost itself, and ``launches_s`` what a thread takes to issue each op, of some of these
    kinds.
    """
    costed: nx.DiGraph[str] = graph.copy()
    of_kind: dict[str, str] = dict(graph.graph.get("cost_source", {}))
    for kind, seconds in costs_s.items():
        source = sources[kind]
        source_of = [source] * len(costed) if isinstance(source, str) else source
        for what, count in (("costs", len(seconds)), ("sources", len(source_of))):
            if count != len(costed):
                raise ValueError(
                    f"{count} {what} for kind {kind!r}, but the graph has {len(costed)} ops"
                )
        unknown = np.full(len(costed), math.nan)
        further_s = {
            name: dict(by_kind or {}).get(kind, unknown).tolist()
            for name, by_kind in (("loaded_cost_s", loaded_s), ("launch_s", launches_s))
        }
        rows = [*zip(costed, seconds.tolist(), source_of, strict=True)]
        counts = Counter(text for _, cost_s, text in rows if not math.isnan(cost_s))
        before = of_kind.get(kind, "")
        if counts:
            of_kind[kind] = counts.most_common(1)[0][0]
        for i, (op_id, cost_s, text) in enumerate(rows):
            known = attributes_of(costed, op_id)
            stays = math.isnan(cost_s)
            if stays and kind not in known["cost_s"]:
                continue
            own = known["cost_source"].get(kind, before) if stays else text
            further = {k: other for k, other in known["cost_source"].items() if k != kind}
            costed.nodes[op_id]["cost_source"] = further | (
                {kind: own} if own != of_kind.get(kind, "") else {}
            )
            if stays:
                continue
            costed.nodes[op_id]["cost_s"] = {**known["cost_s"], kind: cost_s}
            for name, values in further_s.items():
                beside = {k: s for k, s in costed.nodes[op_id][name].items() if k != kind}
                costed.nodes[op_id][name] = beside | (
                    {} if math.isnan(values[i]) else {kind: values[i]}
                )
    costed.graph["cost_source"] = of_kind
    return costed


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class BusyShares:
    """Shares of the other devices of a machine that always compute, and that compute at most."""

    always: float = 0.0
    at_most: float = 1.0


def with_busy_devices(graph: nx.DiGraph[str], busy: BusyShares) -> nx.DiGraph[str]:
    """Return the graph of a step on some devices of a machine, while others always compute.

    Loaded costs are those beside all other devices of the machine. An op's cost becomes that beside
    those that always compute, its loaded cost that beside all that may compute.
    """
    if busy == BusyShares() or not any(node["loaded_cost_s"] for _, node in graph.nodes(data=True)):
        return graph
    loaded = graph.copy()
    for _, node in loaded.nodes(data=True):
        alone_s, beside_s = node["cost_s"], node["loaded_cost_s"]
        extra_s = {kind: beside_s[kind] - alone_s[kind] for kind in beside_s}
        node["cost_s"] = alone_s | {k: alone_s[k] + busy.always * extra_s[k] for k in extra_s}
        node["loaded_cost_s"] = {k: alone_s[k] + busy.at_most * extra_s[k] for k in extra_s}
    return loaded


SCALED: Final = ("flops", "moved_bytes", "output_bytes", "saved_bytes", "workspace_bytes")
"""Attributes that scale with the batch; parameters, gradients and optimizer state do not."""


def with_part_of_batch(graph: nx.DiGraph[str], parts: int | Fraction) -> nx.DiGraph[str]:
    """Return the graph of the same step with its batch divided by ``parts`` (below 1: multiplied).

    Costs and activations of forward and backward ops are divided; optimizer ops stay as they are.
    Divided times are too low for ops that do not depend on the batch, or that need a large batch to
    use their device.
    """
    if parts <= 0:
        raise ValueError(f"a batch is divided by {parts}, not above 0")
    smaller = graph.copy()
    if parts == 1:
        return smaller
    for op_id, node in smaller.nodes(data=True):
        if node["phase"] != "optimizer":
            for name in ("cost_s", "loaded_cost_s"):
                node[name] = {kind: cost / parts for kind, cost in node[name].items()}
            node |= {name: -(-node[name] // parts) for name in SCALED}
        for _, target, edge in smaller.out_edges(op_id, data=True):
            if attributes_of(smaller, target)["phase"] != "optimizer":
                edge["bytes"] = -(-edge["bytes"] // parts)
    return smaller


@dataclass(frozen=True, slots=True)
class CostedOp:
    """An op, its seconds on a device kind and their source ("" if unknown)."""

    id: str
    cost_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a graph on one device kind, without transfers and launch overheads.

    ``critical_path_s`` is the longest path of costs, a lower bound for any number of such devices.
    ``dearest`` lists the most expensive ops, in descending order.
    """

    total_s: float
    critical_path_s: float
    dearest: tuple[CostedOp, ...]

    @property
    def headroom(self) -> float:
        """Total work / critical path: the largest possible speedup over one such device."""
        return self.total_s / self.critical_path_s if self.critical_path_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSummary:
    """Counts and sums over all ops of a graph.

    ``work`` has an entry for each device kind ("*": any other) that all ops have costs for,
    ``partly_known`` counts for the other kinds the ops that have one.
    """

    name: str
    ops: Mapping[str, int]  # by phase
    edges: int
    flops: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    work: Mapping[str, Work]
    partly_known: Mapping[str, int]

    @classmethod
    def of(cls, whole: nx.DiGraph[str], *, dearest: int = 10) -> GraphSummary:
        """Summarize a graph, with its ``dearest`` most expensive ops."""
        graph = GraphArrays.from_graph(whole)
        costs_s = {kind: graph.costs_for(kind) for kind in graph.cost_s}
        known = {kind: int((~np.isnan(cost_s)).sum()) for kind, cost_s in costs_s.items()}
        return cls(
            name=graph.name,
            ops={phase: int((graph.phase == i).sum()) for i, phase in enumerate(PHASES)},
            edges=graph.edge_count,
            flops=sum(graph.flops.tolist()),
            parameter_bytes=sum(graph.parameter_bytes.tolist()),
            gradient_bytes=sum(graph.gradient_bytes.tolist()),
            optimizer_bytes=sum(graph.optimizer_bytes.tolist()),
            saved_bytes=sum(graph.saved_bytes.tolist()),
            work={
                kind: Work(
                    total_s=float(cost_s.sum()),
                    critical_path_s=critical_path_s(graph, cost_s),
                    dearest=_dearest(whole, kind, cost_s, dearest),
                )
                for kind, cost_s in costs_s.items()
                if known[kind] == len(graph)
            },
            partly_known={kind: n for kind, n in known.items() if n < len(graph)},
        )


def _dearest(
    graph: nx.DiGraph[str], kind: str, cost_s: NDArray[np.float64], count: int
) -> tuple[CostedOp, ...]:
    ids = list(graph)
    top = np.argsort(-cost_s, kind="stable")[:count].tolist()
    return tuple(CostedOp(ids[i], float(cost_s[i]), cost_source(graph, ids[i], kind)) for i in top)


def critical_path_s(graph: GraphArrays, cost_s: NDArray[np.float64]) -> float:
    """Return the seconds of the longest path through a graph, given the cost (N,) of every op."""
    start, successors = graph.successor_start.tolist(), graph.successors.tolist()
    costs_s: list[float] = cost_s.tolist()
    begins = [0.0] * len(graph)
    longest = 0.0
    for i in graph.topological.tolist():
        ends = begins[i] + costs_s[i]
        longest = max(longest, ends)
        for v in successors[start[i] : start[i + 1]]:
            begins[v] = max(begins[v], ends)
    return longest
