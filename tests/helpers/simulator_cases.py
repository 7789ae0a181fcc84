"""Problems for tests of the simulator: random ones with every input option, and small ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from envs.hardware.cluster import LINK_ORDERS, SHARINGS, Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import (
    NO_LIMIT_NS,
    ProblemArrays,
    Schedule,
    Simulator,
    Workspace,
    simulate_batch,
)
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

Case: TypeAlias = "tuple[nx.DiGraph[str], Cluster, list[int], list[float]]"


def simulated_ns(
    arrays: ProblemArrays,
    work: Workspace,
    devices: NDArray[np.int32],
    priority: NDArray[np.float64],
    memory: int,
    limit_ns: int = NO_LIMIT_NS,
) -> int:
    """Simulate one placement the way compiled callers of ``simulate_core`` do."""
    step_ns = np.empty(1, np.int64)
    simulate_batch(arrays, work, devices[None], priority[None], limit_ns, memory, step_ns)
    return int(step_ns[0])


def random_graph(
    rng: random.Random, cluster: Cluster, *, bad_places: bool, plain: bool, large: bool
) -> nx.DiGraph[str]:
    """Return up to 16 (large: 300) ops in random order; with ties and, unless plain, zero costs."""
    graph = new_graph("random")
    count = rng.choice([70, 130, 200, 300]) if large else rng.randint(1, 16)
    names = [f"op{i}" for i in range(count)]
    rng.shuffle(names)
    costs = rng.choice([[0.0, 1e-6], [1e-6], [1e-6, 2e-6, 3e-6], [0.0, 1.2345e-6, 5e-7, 3.3e-5]])
    if plain:
        costs = [cost or 1e-9 for cost in costs]
    sizes = rng.choice([[0, 1000], [1000], [0, 1, 999, 123_456, 10**6]])
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    grouped = rng.random() < 0.3
    for name in names:
        cost = {kind: rng.choice(costs) for kind in kinds}
        if bad_places and len(kinds) > 1 and rng.random() < 0.1:
            del cost[rng.choice(sorted(kinds))]
        add_op(
            graph,
            name,
            cost_s=cost if rng.random() < 0.5 else {"*": rng.choice(costs), **cost},
            phase="backward" if rng.random() < 0.2 else "forward",
            colocate=rng.choice([None, None, None, "g", "h"]) if grouped else None,
            output_bytes=rng.choice(sizes),
            parameter_bytes=rng.choice(sizes),
            gradient_bytes=rng.choice(sizes),
            optimizer_bytes=rng.choice(sizes),
            saved_bytes=rng.choice(sizes),
            workspace_bytes=rng.choice(sizes),
            devices=cluster.names[:1] if bad_places and rng.random() < 0.05 else None,
        )
    dense = rng.choice([1.0, 3.0, 6.0]) / count if large else rng.choice([0.1, 0.3, 0.6])
    for k, target in enumerate(sorted(names)):
        for source in sorted(names)[:k]:
            if rng.random() < dense:
                add_edge(graph, source, target, rng.choice([None, *sizes]))
    return graph


def add_loaded_costs(rng: random.Random, graph: nx.DiGraph[str]) -> None:
    """Add loaded costs to some ops: equal to the cost, a multiple of it, or more by 1 us."""
    kinds = rng.choice([["gpu"], ["gpu", "cpu"], ["gpu", "cpu", "*"]])
    for node in graph.nodes.values():
        node["loaded_cost_s"] = {
            kind: cost * rng.choice([1.0, 1.37, 2.0]) + rng.choice([0.0, 0.0, 1e-6])
            for kind, cost in node["cost_s"].items()
            if kind in kinds and rng.random() < 0.8
        }


def random_ports(rng: random.Random, between: list[str]) -> tuple[tuple[str, ...], ...]:
    """Return two ports of some of the devices; no port has all of them."""
    cut, end = sorted(rng.sample(range(len(between) + 1), 2))
    lists = (tuple(between[:cut]), tuple(between[cut:end]))
    return tuple(port for port in lists if 0 < len(port) < len(between))


def random_link(rng: random.Random, between: list[str], *, plain: bool) -> Link:
    sharing, full_duplex = rng.choice(SHARINGS), rng.random() < 0.5
    one_way = len(between) == 2 and rng.random() < 0.3
    return Link(
        between=tuple(between),
        latency_s=rng.choice([1e-9 if plain else 0.0, 1e-6, 3.7e-6]),
        bandwidth_bytes_per_s=rng.choice([math.inf, 1e9, 7e8]),
        sharing=sharing,
        full_duplex=full_duplex,
        order="fifo" if plain else rng.choice(LINK_ORDERS),
        one_way=one_way,
        bus="shared" if one_way and sharing == "bus" and plain else "",
        ports=random_ports(rng, between) if rng.random() < 0.4 else (),
        ingress=sharing == "egress" and full_duplex and not plain and rng.random() < 0.5,
    )


def random_cluster(rng: random.Random, hosts: list[str], *, plain: bool, large: bool) -> Cluster:
    """Return up to 5 (large: 9) devices; unless plain, links may take no time or use priorities."""
    devices = tuple(
        Device(
            name=f"{hosts[k]}d{k}",
            kind=rng.choice(["gpu", "cpu"]),
            memory_bytes=rng.choice([3000, 200_000, 10**6, 10**9]),
            launch_s=rng.choice([0.0, 1e-6, 2.5e-7]),
        )
        for k in range(rng.randint(1, 9 if large else 5))
    )
    names = [device.name for device in devices]
    links = []
    if len(names) > 1:
        links = [
            random_link(rng, rng.sample(names, rng.randint(2, len(names))), plain=plain)
            for _ in range(rng.randint(0, 2))
        ]
        if rng.random() < 0.9:
            links.append(random_link(rng, names, plain=plain))
        if links and any(link.ports for link in links) and rng.random() < 0.8:
            links.append(
                replace(random_link(rng, names, plain=plain), ports=())
            )  # for devices that share a port
    return Cluster(
        name="random",
        devices=devices,
        links=tuple(links),
        once_per_destination=plain or rng.random() < 0.7,
    )


def allowed_devices(graph: nx.DiGraph[str], cluster: Cluster) -> list[set[str]]:
    """Return the devices on which each op, or each group of ops, may run."""
    allowed: dict[str, set[str]] = {}
    for op_id, node in graph.nodes.items():
        known = {
            d.name for d in cluster.devices if not node["cost_s"].keys().isdisjoint(("*", d.kind))
        }
        here = known.intersection(cluster.names if node["devices"] is None else node["devices"])
        group = node["colocate"] or op_id
        allowed[group] = allowed.get(group, here) & here
    return list(allowed.values())


def random_case(seed: int, *, bad_places: bool = True, large: bool = False) -> Case:
    """Return a graph, a cluster, devices that keep groups together, and priorities.

    Every second case is plain: most of those take the fast path of the simulator. Two fifths have
    loaded costs, some of them on two hosts.
    """
    rng = random.Random(seed)
    plain = rng.random() < 0.5
    of_load = random.Random(f"load {seed}")
    loaded, two_hosts = of_load.random() < 0.4, of_load.random() < 0.3
    hosts = [of_load.choice(["n0:", "n1:"]) if two_hosts else "" for _ in range(9)]
    cluster = random_cluster(rng, hosts, plain=plain, large=large)
    while True:
        graph = random_graph(rng, cluster, bad_places=bad_places, plain=plain, large=large)
        if loaded:
            add_loaded_costs(of_load, graph)
        if all(allowed_devices(graph, cluster)):
            break
    home = {group: rng.randrange(len(cluster)) for group in ("g", "h")}
    devices = [
        home[node["colocate"]] if node["colocate"] else rng.randrange(len(cluster))
        for node in graph.nodes.values()
    ]
    levels = rng.choice([1, 3, 1000])
    return graph, cluster, devices, [float(rng.randrange(levels)) for _ in graph]


def problem_of(case: Case) -> tuple[Problem, np.ndarray, np.ndarray]:
    graph, cluster, devices, priority = case
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    return problem, np.array(devices, np.int32), np.array(priority)


def one_kind(count: int, **link: Any) -> Cluster:
    """Return devices d0, d1, ... without launch cost; by default with 1 GB/s and 1 us links."""
    names = tuple(f"d{k}" for k in range(count))
    options: dict[str, Any] = {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9, **link}
    links = (Link(between=names, **options),) if count > 1 else ()
    devices = tuple(Device(name=name, kind="gpu", memory_bytes=10**9) for name in names)
    return Cluster(name="plain", devices=devices, links=links)


def fork(width: int, moved: int = 1000) -> nx.DiGraph[str]:
    """Return a graph where op s feeds ``moved`` bytes to ops 0, 1, ...; each op takes 1 us."""
    graph = new_graph("fork")
    add_op(graph, "s", cost_s={"*": 1e-6}, output_bytes=moved)
    for k in range(width):
        add_op(graph, str(k), cost_s={"*": 1e-6})
        add_edge(graph, "s", str(k))
    return graph


def run(
    graph: nx.DiGraph[str],
    cluster: Cluster,
    devices: list[int],
    priority: list[float] | None = None,
) -> Schedule:
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    return Simulator(problem).run(
        np.array(devices, np.int32), np.array(priority or [0.0] * len(devices))
    )
