"""User constraints on a placement, applied to the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from envs.cluster import Cluster
from graphs.pins import keep_together, pin
from graphs.selection import DemandError


def demanded(
    graph: nx.DiGraph[str], cluster: Cluster, together: Sequence[str], pins: Mapping[str, str]
) -> nx.DiGraph[str]:
    """Return the graph with co-located and pinned ops; the same object if there are no constraints.

    Args:
        graph: any graph.
        cluster: the devices that pins may name.
        together: patterns, see :func:`graphs.pins.keep_together`.
        pins: {pattern: device name}, see :func:`graphs.pins.pin`.

    Raises:
        DemandError: a device does not exist, a pattern matches nothing, or pins contradict each
            other or separate ops that must share a device.
    """
    for pattern, device in pins.items():
        if device not in cluster.names:
            raise DemandError(
                f"{pattern!r} is pinned to {device!r}, but the devices are "
                f"{', '.join(cluster.names)}"
            )
    if together:
        graph = keep_together(graph, together)
    return pin(graph, pins) if pins else graph
