"""Small clusters: two torch devices, two devices as TOML, and nodes with network cards."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np

from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.discover import discover
from envs.problem import Problem
from graphs.costs import with_costs
from graphs.graph import GraphArrays


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


def uneven_nodes(*sizes: int, across_bytes_per_s: float = 1e8) -> Cluster:
    """Return nodes of these sizes with a fast link in each, and a slow one between all devices."""
    names = [[f"n{k}:g{i}" for i in range(size)] for k, size in enumerate(sizes)]
    devices = tuple(
        Device(name=name, kind="gpu", memory_bytes=10**15) for node in names for name in node
    )
    every = tuple(device.name for device in devices)
    inside = [
        Link(between=tuple(node), latency_s=1e-6, bandwidth_bytes_per_s=1e11)
        for node in names
        if len(node) > 1
    ]
    across = Link(between=every, latency_s=1e-5, bandwidth_bytes_per_s=across_bytes_per_s)
    return Cluster(name="uneven", devices=devices, links=(*inside, across))


MEMORY = {"cuda:0": 1 << 30, "cpu": 1 << 30}


def pair(memory: dict[str, int] | None = None) -> Cluster:
    """Return the second device of the test and the CPU, with 1 GiB each."""
    # imported here: vdev makes autograd start threads, and ranks of tests fork
    from tests.helpers.second_devices import second

    names = (str(second()), "cpu")
    return discover(",".join(names), memory or dict.fromkeys(names, 1 << 30))


def linked(cluster: Cluster | None = None) -> Cluster:
    """Return a cluster, that of :func:`pair` by default, with one link of all its devices."""
    cluster = cluster or pair()
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    return replace(cluster, links=(link,))


def equal_costs(graph: nx.DiGraph[str], cluster: Cluster | None = None) -> Problem:
    """Return the problem of a graph whose ops all take 10 us on every device, of two by default."""
    cluster = linked(cluster)
    costs_s = {device.kind: np.full(len(graph), 1e-5) for device in cluster.devices}
    known = with_costs(graph, costs_s, dict.fromkeys(costs_s, "made"))
    return Problem.of(GraphArrays.from_graph(known), cluster)


def toy_pair(*names: str, kind: str = "x") -> Cluster:
    """Return a cluster of these two devices and the link between them."""
    devices = (
        Device(
            name=name,
            kind=kind,
            memory_bytes=1 << 40,
            peak_flop_per_s=1e9,
            bandwidth_bytes_per_s=1e9,
        )
        for name in names
    )
    link = Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    return Cluster(name="pair", devices=tuple(devices), links=(link,))


CLUSTER = """
format = "placer-cluster/1"
name = "pair"
[[device]]
name = "a"
kind = "x"
memory_bytes = {memory}
[[device]]
name = "b"
kind = "x"
memory_bytes = {memory}
[[link]]
between = ["a", "b"]
latency_s = 1e-6
bandwidth_bytes_per_s = 1e10
"""
