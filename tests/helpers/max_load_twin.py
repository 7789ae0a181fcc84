"""Plain implementation of the max-load objective, from graph and cluster."""

from __future__ import annotations

import networkx as nx

from envs.hardware.cluster import Cluster
from tests.helpers.simulator_twin import Sending, _cost_ns, _link, _may_run, _transfer_ns

KEPT = ("parameter", "gradient", "optimizer", "output", "workspace")
"""Op attributes whose sum is the memory used on a device."""


def twin_loads(
    graph: nx.DiGraph[str], cluster: Cluster, devices: list[int]
) -> tuple[list[int], bool]:
    """Return the load of each device in nanoseconds, and whether the placement is feasible."""
    where = dict(zip(graph, devices, strict=True))
    names = list(cluster.names)
    load = [0] * len(names)
    used = [0] * len(names)
    feasible = all(_may_run(graph, cluster, op, where[op]) for op in graph)

    def pay(d: int, transfer_ns: int) -> None:
        if cluster.devices[d].kind != "cpu":
            load[d] += transfer_ns

    for op in graph:
        home, node = where[op], graph.nodes[op]
        if _may_run(graph, cluster, op, home):
            load[home] += _cost_ns(graph, cluster, op, home)
        used[home] += sum(node[f"{name}_bytes"] for name in KEPT)
        needed_by: dict[int, int] = {}
        for reader in graph.successors(op):
            size = graph.edges[op, reader]["bytes"]
            needed_by[where[reader]] = max(size, needed_by.get(where[reader], 0))
        needed_by.pop(home, None)
        times = [0]
        for d, size in needed_by.items():
            if _link(cluster, names, home, d) is None:
                feasible = False
                continue
            times.append(_transfer_ns(cluster, names, Sending(0, home, d, 0, size, [])))
            pay(d, times[-1])
        pay(home, max(times))
    room = [device.memory_bytes for device in cluster.devices]
    return load, feasible and all(u <= m for u, m in zip(used, room, strict=True))
