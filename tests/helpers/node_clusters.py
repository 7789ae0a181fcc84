"""Clusters of nodes of equal devices: a link inside every node and a network card per node."""

from __future__ import annotations

from envs.hardware.cluster import Cluster, Device, Link


def nodes(
    count: int,
    per_node: int,
    *,
    inside_bytes_per_s: float = 1e11,
    across_bytes_per_s: float = 1e10,
    inside_s: float = 0.0,
    across_s: float = 0.0,
    own_cards: bool = False,
    memory_bytes: int = 10**15,
) -> Cluster:
    """Return ``count`` nodes; with ``own_cards`` every device has its own network card."""
    names = [[f"n{n}:g{g}" for g in range(per_node)] for n in range(count)]
    every = tuple(name for node in names for name in node)
    links = [
        Link(between=tuple(node), latency_s=inside_s, bandwidth_bytes_per_s=inside_bytes_per_s)
        for node in names
        if per_node > 1
    ]
    if count > 1:
        links.append(
            Link(
                between=every,
                latency_s=across_s,
                bandwidth_bytes_per_s=across_bytes_per_s,
                ports=() if own_cards else tuple(map(tuple, names)),
                ingress=True,
            )
        )
    return Cluster(
        name=f"{count} nodes of {per_node}",
        devices=tuple(Device(name=name, kind="gpu", memory_bytes=memory_bytes) for name in every),
        links=tuple(links),
    )
