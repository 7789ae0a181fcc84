"""What the user demands of a placement, put into the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from envs.cluster import Cluster
from graphs.pins import keep_together, pin
from graphs.selection import DemandError


def demanded(
    graph: nx.DiGraph[str], cluster: Cluster, together: Sequence[str], pins: Mapping[str, str]
) -> nx.DiGraph[str]:
    """The graph with co-located and pinned ops; the very same one if nothing is demanded.

    Args:
        graph: any graph.
        cluster: the devices that pins may name.
        together: patterns, see :func:`graphs.pins.keep_together`.
        pins: {pattern: device name}, see :func:`graphs.pins.pin`.

    Raises:
        DemandError: a device or what a pattern names is not there, or two pins contradict
            each other or part ops that must share a device.
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
