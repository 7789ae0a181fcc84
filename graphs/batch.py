"""Scaling the graph of a step to another batch size, without a model to trace again."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import networkx as nx

from graphs.graph import attributes_of

SCALED: Final = ("flops", "moved_bytes", "output_bytes", "saved_bytes", "workspace_bytes")
"""Attributes that scale with the batch; parameters, gradients and optimizer state do not."""


def with_part_of_batch(graph: nx.DiGraph[str], parts: int | Fraction) -> nx.DiGraph[str]:
    """Return the graph of the same step with its batch divided by ``parts`` (below 1: multiplied).

    Costs and activations of forward and backward ops are divided; optimizer ops stay as they are.
    Divided times are too low for ops that do not depend on the batch, or that need a large batch to
    use their device.

    Raises:
        ValueError: ``parts`` is not above 0.
    """
    if parts <= 0:
        raise ValueError(f"a batch is divided by {parts}, not above 0")
    smaller = graph.copy()
    if parts == 1:
        return smaller
    for op_id, node in smaller.nodes(data=True):
        if node["phase"] != "optimizer":
            node["cost_s"] = {kind: cost / parts for kind, cost in node["cost_s"].items()}
            node |= {name: -(-node[name] // parts) for name in SCALED}
        for _, target, edge in smaller.out_edges(op_id, data=True):
            if attributes_of(smaller, target)["phase"] != "optimizer":
                edge["bytes"] = -(-edge["bytes"] // parts)
    return smaller
