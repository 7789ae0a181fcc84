"""Backward passes mirrored from forward graphs, for graphs that have no model."""

from __future__ import annotations

import networkx as nx

from graphs.graph import add_edge, add_op, attributes_of, topological_order

WEIGHT: str = "weight"
"""Op that only holds parameters; its backward op adds up the gradients of all its readers."""
ACCUMULATES: str = ".gradient"
"""Suffix of the names of ops that add up the gradients of one tensor."""


def backward_id(op_id: str) -> str:
    """Return the id of an op's backward op.

    >>> backward_id("layers.3:linear")
    'layers.3:backward/linear'
    """
    module, colon, name = op_id.rpartition(":")
    return f"{module}{colon}backward/{name}"


def with_backward(forward: nx.DiGraph[str], *, together: bool = False) -> nx.DiGraph[str]:
    """Return a training step: all forward ops, then a backward op for each, in reverse order.

    A backward op costs twice its forward op: a matrix product has two backward. It reads the
    gradients of its op's output (every forward edge reversed, with the same bytes), what its op
    saved for it, and the weights that its op read.
    With ``together`` it is co-located with its forward op.
    """
    order = topological_order(forward)
    graph: nx.DiGraph[str] = nx.DiGraph(**forward.graph)
    for op_id in forward:
        node = attributes_of(forward, op_id)
        if node["phase"] != "forward":
            raise ValueError(f"op {op_id!r} is of phase {node['phase']} already")
        group = node["colocate"]
        if together and group is None:
            node = {**node, "colocate": op_id}
        add_op(graph, op_id, **node)
    for source, target, edge in forward.edges(data=True):
        add_edge(graph, source, target, edge["bytes"])
    for op_id in reversed(order):
        _add_backward_op(graph, forward, op_id)
    return graph


def _add_backward_op(graph: nx.DiGraph[str], forward: nx.DiGraph[str], op_id: str) -> None:
    node = attributes_of(graph, op_id)
    gradients = {source: forward.edges[source, op_id]["bytes"] for source in forward.pred[op_id]}
    own_id = backward_id(op_id)
    add_op(
        graph,
        own_id,
        cost_s={kind: 2.0 * seconds for kind, seconds in node["cost_s"].items()},
        loaded_cost_s={kind: 2.0 * seconds for kind, seconds in node["loaded_cost_s"].items()},
        launch_s=node["launch_s"],
        cost_source=node["cost_source"],
        op=f"{node['op']}_backward",
        phase="backward",
        module=node["module"],
        flops=2 * node["flops"],
        moved_bytes=2 * node["moved_bytes"],
        output_bytes=sum(gradients.values()),
        workspace_bytes=node["workspace_bytes"],
        colocate=node["colocate"],
        devices=node["devices"],
    )
    for consumer in forward.succ[op_id]:
        add_edge(graph, backward_id(consumer), own_id, forward.edges[op_id, consumer]["bytes"])
    for source, size in gradients.items():
        if attributes_of(forward, source)["op"] == WEIGHT:
            add_edge(graph, source, own_id, size)
    if node["op"] != WEIGHT:
        add_edge(graph, op_id, own_id, node["saved_bytes"])
