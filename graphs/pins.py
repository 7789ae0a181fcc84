"""What users demand of a placement: ops on named devices, ops that stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from graphs.graph import attributes_of
from graphs.selection import DemandError, matching


def pin(graph: nx.DiGraph[str], devices: Mapping[str, str]) -> nx.DiGraph[str]:
    """A copy of a graph in which the matching ops may only run on the given device.

    Args:
        graph: any graph.
        devices: {op id, module path or glob: device name}, see :func:`graphs.selection.matching`.

    Raises:
        DemandError: a pattern matches nothing, two patterns want one op on different devices, or
            the graph does not allow the device for an op.
    """
    pinned: nx.DiGraph[str] = graph.copy()
    pinned_by: dict[str, str] = {}
    for pattern, device in devices.items():
        for op_id in matching(graph, pattern):
            other = pinned_by.setdefault(op_id, pattern)
            if devices[other] != device:
                raise DemandError(
                    f"op {op_id!r} is pinned to {devices[other]} by {other!r} and to {device} by "
                    f"{pattern!r}; give patterns that do not overlap"
                )
            allowed = attributes_of(graph, op_id)["devices"]
            if allowed is not None and device not in allowed:
                raise DemandError(
                    f"op {op_id!r} cannot be pinned to {device}: the graph allows only "
                    f"{', '.join(allowed)}"
                )
            pinned.nodes[op_id]["devices"] = (device,)
    return pinned


def keep_together(graph: nx.DiGraph[str], patterns: Sequence[str]) -> nx.DiGraph[str]:
    """A copy of a graph in which the ops that match one pattern share a device.

    Patterns that overlap, and co-location groups that a pattern touches, become one group.

    Raises:
        DemandError: a pattern matches nothing.
    """
    kept: nx.DiGraph[str] = graph.copy()
    for pattern in patterns:
        chosen = matching(kept, pattern)
        touched = {attributes_of(kept, op_id)["colocate"] for op_id in chosen} - {None}
        chosen += [op_id for op_id in kept if attributes_of(kept, op_id)["colocate"] in touched]
        for op_id in chosen:
            kept.nodes[op_id]["colocate"] = f"kept together: {pattern}"
    return kept
