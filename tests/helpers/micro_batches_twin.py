"""Specification of micro-batches: a step of m micro-batches as one plain graph."""

from __future__ import annotations

import networkx as nx

from envs.hardware.cluster import Cluster
from graphs.graph import add_edge, new_graph


def twin_graph(
    graph: nx.DiGraph[str], cluster: Cluster, m: int, in_flight: int
) -> tuple[nx.DiGraph[str], list[str], list[int]]:
    """Return the graph of m micro-batches, and for each of its ops the copied op and its batch."""
    whole = new_graph("whole")
    ids = list(graph)
    phase = {op: graph.nodes[op]["phase"] for op in ids}
    origin: list[str] = []
    batch: list[int] = []

    def copy(op: str, k: int) -> str:
        return op if phase[op] == "optimizer" else f"{op}[{k}]"

    def add(name: str, op: str, k: int) -> None:
        data = dict(graph.nodes[op])
        data["colocate"] = data["colocate"] or f"copies of {op}"
        if k > 0:
            data.update(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
        whole.add_node(name, **data)
        origin.append(op)
        batch.append(k)

    for k in range(m):
        for op in ids:
            if k == 0 or phase[op] != "optimizer":
                add(copy(op, k), op, k)
    sums = [
        op
        for op in ids
        if phase[op] == "backward"
        and all(phase[reader] == "optimizer" for reader in graph.successors(op))
    ]
    for k in range(m):
        for u, v in graph.edges:
            if whole.has_edge(copy(u, k), copy(v, k)):
                continue  # both ops exist only once
            if u in sums and k < m - 1:
                continue
            add_edge(whole, copy(u, k), copy(v, k), graph.edges[u, v]["bytes"])
        for op in sums:
            if k > 0:
                add_edge(whole, copy(op, k - 1), copy(op, k))
    last = last_backward(graph, cluster)
    for k in range(in_flight, m if last else 0):
        gate = f"gate[{k}]"
        assert last is not None
        add(gate, last, k)
        for size in [name for name in whole.nodes[gate] if name.endswith("_bytes")]:
            whole.nodes[gate][size] = 0
        whole.nodes[gate].update(phase="forward")
        add_edge(whole, copy(last, k - in_flight), gate, 0)
        for op in ids:
            if phase[op] == "forward" and graph.in_degree(op) == 0:
                add_edge(whole, gate, copy(op, k), 0)
    return whole, origin, batch


def last_backward(graph: nx.DiGraph[str], cluster: Cluster) -> str | None:
    """Return the backward op that ends last on unlimited fastest devices without transfers.

    An op may use the devices that are allowed for its whole co-location group.
    """
    end: dict[str, int] = {}
    order = list(nx.lexicographical_topological_sort(graph, key=list(graph).index))
    for op in order:
        end[op] = max((end[u] for u in graph.predecessors(op)), default=0) + min(
            round((cost + device.launch_s) * 1e9)
            for device in cluster.devices
            for cost in [_cost_s(graph, op, device.kind, device.name)]
            if cost is not None
            and all(
                _cost_s(graph, other, device.kind, device.name) is not None
                for other in graph
                if graph.nodes[other]["colocate"] == graph.nodes[op]["colocate"] is not None
            )
        )
    backward = [op for op in order if graph.nodes[op]["phase"] == "backward"]
    return max(reversed(backward), key=end.__getitem__, default=None)


def twin_priority(
    graph: nx.DiGraph[str], whole: nx.DiGraph[str], origin: list[str], batch: list[int],
    priority: list[float],
) -> list[float]:  # fmt: skip
    """Return priorities that order the ops as in 1F1B."""
    own = dict(zip(graph, priority, strict=True))
    place = {op: i for i, op in enumerate(graph)}

    def urgency(j: int) -> tuple[int, int, float, int]:
        phases = ["backward", "optimizer", "forward"]
        is_gate = names[j].startswith("gate[")
        kind = 0 if is_gate else 1 + phases.index(whole.nodes[names[j]]["phase"])
        return kind, batch[j], -own[origin[j]], place[origin[j]]

    names = list(whole)
    order = sorted(range(len(names)), key=urgency)
    return [-float(order.index(j)) for j in range(len(names))]


def _cost_s(graph: nx.DiGraph[str], op: str, kind: str, name: str) -> float | None:
    node = graph.nodes[op]
    if node["devices"] is not None and name not in node["devices"]:
        return None
    costs: dict[str, float] = node["cost_s"]
    return costs.get(kind, costs.get("*"))
