"""A small problem for defaults, examples and warm-up."""

from __future__ import annotations

from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph


def toy_problem() -> Problem:
    """Return a problem of two chains of six ops that join, on three equal devices."""
    graph = new_graph("two-towers")
    add_op(graph, "input", cost_s={"*": 1e-4}, output_bytes=100_000)
    for tower in ("left", "right"):
        for layer in range(6):
            name = f"{tower}.{layer}"
            add_op(graph, name, cost_s={"*": 1e-3}, output_bytes=500_000, parameter_bytes=4_000_000)
            add_edge(graph, f"{tower}.{layer - 1}" if layer else "input", name)
    add_op(graph, "join", cost_s={"*": 5e-4})
    for tower in ("left", "right"):
        add_edge(graph, f"{tower}.5", "join")
    names = ("device:0", "device:1", "device:2")
    link = Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    cluster = Cluster(
        name="three-devices",
        devices=tuple(Device(name=n, kind="device", memory_bytes=10**9) for n in names),
        links=(link,),
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)
