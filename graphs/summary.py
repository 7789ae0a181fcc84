"""Summary of a graph in a few numbers: ops, sizes, total work and critical path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.graph import PHASES, GraphArrays, cost_source


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
    own: list[float] = cost_s.tolist()
    begins = [0.0] * len(graph)
    longest = 0.0
    for i in graph.topological.tolist():
        ends = begins[i] + own[i]
        longest = max(longest, ends)
        for v in successors[start[i] : start[i + 1]]:
            begins[v] = max(begins[v], ends)
    return longest
