"""Specification of the simulator: one step, plain and slow, from graph and cluster.

It shares nothing with the compiled simulator but the two modules that describe its input. Ops and
devices are numbered in order of insertion. ``twin_step`` holds the rules; read it first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import networkx as nx

from envs.hardware.cluster import Cluster, Link
from graphs.graph import ANY_KIND


@dataclass
class Sending:
    """One transfer: an output on its way to the consumers on one device."""

    producer: int
    source: int
    destination: int
    edge: int
    size: int
    consumers: list[int]
    request_ns: int = -1
    start_ns: int = -1
    end_ns: int = -1


@dataclass
class Step:
    """Result of ``twin_step``; ``blocked`` if the placement cannot run at all."""

    blocked: bool = False
    step_ns: int = 0
    start_ns: dict[int, int] = field(default_factory=dict)
    end_ns: dict[int, int] = field(default_factory=dict)
    peak_bytes: list[int] = field(default_factory=list)
    sendings: list[Sending] = field(default_factory=list)


def twin_step(
    graph: nx.DiGraph[str], cluster: Cluster, devices: list[int], priority: list[float]
) -> Step:
    ids = list(graph)
    nodes = [graph.nodes[op] for op in ids]
    index = {op: i for i, op in enumerate(ids)}
    consumers = [sorted(index[v] for v in graph.successors(op)) for op in ids]
    producers = [sorted(index[u] for u in graph.predecessors(op)) for op in ids]
    names = [device.name for device in cluster.devices]
    edge_number = {
        pair: k for k, pair in enumerate((u, v) for u in index.values() for v in consumers[u])
    }
    step = Step(peak_bytes=[0] * len(names))

    if any(not _may_run(graph, cluster, op, devices[index[op]]) for op in ids):
        return Step(blocked=True)
    for u, v in edge_number:
        if devices[u] != devices[v] and _link(cluster, names, devices[u], devices[v]) is None:
            return Step(blocked=True)

    used = [sum(_resident_bytes(n) for n, d in zip(nodes, devices, strict=True) if d == k)
            for k in range(len(names))]  # fmt: skip
    step.peak_bytes = list(used)
    missing = [len(p) for p in producers]
    needs_output: list[set[object]] = [set() for _ in ids]  # users of an output on its own device
    needs_copy: dict[int, set[int]] = {}  # id of a sending -> consumers that keep its copy
    carrier: dict[tuple[int, int], Sending] = {}
    ready = {i for i in range(len(ids)) if not producers[i]}
    running: dict[int, int] = {}  # device -> op
    waiting: list[Sending] = []
    flying: list[Sending] = []
    events: list[int] = [0]

    def allocate(d: int, size: int) -> None:
        used[d] += size
        step.peak_bytes[d] = max(step.peak_bytes[d], used[d])

    def queue_order(sending: Sending) -> tuple[float, int, int, int, int]:
        link = _link(cluster, names, sending.source, sending.destination)
        by_priority = link is not None and link.order == "priority"
        urgency = max(priority[v] for v in sending.consumers) if by_priority else 0.0
        return (-urgency, sending.request_ns, sending.producer, sending.destination, sending.edge)

    while events:
        now = heapq.heappop(events)
        if events and events[0] == now:
            continue  # handle everything that ends now in one round
        # 1. Everything that ends now, ops and transfers.
        ended_sendings = [s for s in flying if s.end_ns == now]
        flying = [s for s in flying if s.end_ns > now]
        ended_ops = [i for i in running.values() if step.end_ns[i] == now]
        running = {d: i for d, i in running.items() if step.end_ns[i] > now}
        arrived: list[int] = []
        for s in ended_sendings:
            arrived += s.consumers
            needs_output[s.producer].discard(id(s))
            if not needs_output[s.producer]:
                used[s.source] -= nodes[s.producer]["output_bytes"]
        for i in ended_ops:
            d = devices[i]
            used[d] -= nodes[i]["workspace_bytes"]
            for u in producers[i]:
                if devices[u] == d:
                    needs_output[u].discard(i)
                    if not needs_output[u]:
                        used[d] -= nodes[u]["output_bytes"]
                else:
                    s = carrier[u, i]
                    needs_copy[id(s)].discard(i)
                    if not needs_copy[id(s)]:
                        used[d] -= s.size
            here = [v for v in consumers[i] if devices[v] == d]
            arrived += here
            needs_output[i].update(here)
            for s in _sendings(graph, cluster, ids, i, consumers[i], devices, edge_number):
                s.request_ns = now
                waiting.append(s)
                step.sendings.append(s)
                needs_output[i].add(id(s))
                needs_copy[id(s)] = set(s.consumers)
                carrier.update({(i, v): s for v in s.consumers})
        for v in arrived:
            missing[v] -= 1
            if missing[v] == 0:
                ready.add(v)
        # 2. Every idle device picks the ready op of highest priority, ties by index.
        started: list[int] = []
        for d in range(len(names)):
            mine = [i for i in ready if devices[i] == d]
            if d in running or not mine:
                continue
            i = min(mine, key=lambda i: (-priority[i], i))
            ready.remove(i)
            running[d] = i
            step.start_ns[i] = now
            started.append(i)
            allocate(d, nodes[i]["output_bytes"] + nodes[i]["workspace_bytes"])
            allocate(d, _held_bytes(graph, ids[i]))
        #    It takes longer by how many of the others of its machine now run an op, too.
        for i in started:
            cost_ns = _cost_ns(graph, cluster, ids[i], devices[i])
            extra_ns = _extra_ns(graph, cluster, ids[i], devices[i], set(running))
            step.end_ns[i] = now + cost_ns + extra_ns
            heapq.heappush(events, step.end_ns[i])
        # 3. Waiting transfers in queue order: each starts if its part of the link is idle.
        occupied = {port for s in flying for port in _ports(cluster, names, s)}
        for s in sorted(waiting, key=queue_order):
            ports = _ports(cluster, names, s)
            if ports & occupied:
                continue
            occupied |= ports
            waiting.remove(s)
            flying.append(s)
            s.start_ns = now
            s.end_ns = now + _transfer_ns(cluster, names, s)
            heapq.heappush(events, s.end_ns)
            allocate(s.destination, s.size)
        step.step_ns = now
    assert len(step.start_ns) == len(ids)
    return step


def _sendings(
    graph: nx.DiGraph[str],
    cluster: Cluster,
    ids: list[str],
    i: int,
    consumers: list[int],
    devices: list[int],
    edge_number: dict[tuple[int, int], int],
) -> list[Sending]:
    """Return the transfers of an output: one per other device, or one per edge."""
    sent: list[Sending] = []
    for v in consumers:
        if devices[v] == devices[i]:
            continue
        size = graph.edges[ids[i], ids[v]]["bytes"]
        same = [s for s in sent if s.destination == devices[v] and cluster.once_per_destination]
        if same:
            same[0].consumers.append(v)
            same[0].size = max(same[0].size, size)
        else:
            sent.append(Sending(i, devices[i], devices[v], edge_number[i, v], size, [v]))
    return sent


def _link(cluster: Cluster, names: list[str], source: int, destination: int) -> Link | None:
    """Return the first listed link from source to destination, or None.

    A link joins no two devices of the same port.
    """
    ends = (names[source], names[destination])
    for link in cluster.links:
        if any(set(ends) <= set(port) for port in link.ports):
            continue
        if link.between == ends if link.one_way else set(ends) <= set(link.between):
            return link
    return None


def _port(link: Link, name: str) -> object:
    return next((k for k, port in enumerate(link.ports) if name in port), name)


def _ports(cluster: Cluster, names: list[str], s: Sending) -> set[object]:
    """Return the resources that a transfer occupies; one resource serves one transfer at a time."""
    link = _link(cluster, names, s.source, s.destination)
    assert link is not None
    which = cluster.links.index(link)
    out, into = _port(link, names[s.source]), _port(link, names[s.destination])
    match link.sharing, link.full_duplex:
        case "none", _:
            return set()
        case "bus", _:
            return {link.bus or which}
        case "pair", True:
            return {(which, out, into)}
        case "pair", False:
            return {(which, frozenset((out, into)))}
        case "egress", True if link.ingress:
            return {(which, "out", out), (which, "in", into)}
        case "egress", True:
            return {(which, out)}
    return {(which, out), (which, into)}


def _transfer_ns(cluster: Cluster, names: list[str], s: Sending) -> int:
    link = _link(cluster, names, s.source, s.destination)
    assert link is not None
    return round((link.latency_s + s.size / link.bandwidth_bytes_per_s) * 1e9)


def _cost_ns(graph: nx.DiGraph[str], cluster: Cluster, op: str, d: int) -> int:
    costs, device = graph.nodes[op]["cost_s"], cluster.devices[d]
    if op.startswith("gate["):  # of a micro-batch, see micro_batches_twin
        return 0
    cost_s = costs[device.kind] if device.kind in costs else costs[ANY_KIND]
    return round(float(cost_s + device.launch_s) * 1e9)


def _extra_ns(graph: nx.DiGraph[str], cluster: Cluster, op: str, d: int, running: set[int]) -> int:
    """Return what an op costs more on device d while ``running`` devices run an op."""
    mates = [k for k in range(len(cluster)) if k != d and _host(cluster, k) == _host(cluster, d)]
    mates = [k for k in mates if _has_loaded_costs(graph, cluster.devices[k].kind)]
    device, costs = cluster.devices[d], graph.nodes[op]["cost_s"]
    loaded_s = graph.nodes[op]["loaded_cost_s"].get(
        device.kind if device.kind in costs else ANY_KIND
    )
    if cluster.hosts or loaded_s is None or not mates or op.startswith("gate["):
        return 0
    extra_ns = round(float(loaded_s + device.launch_s) * 1e9) - _cost_ns(graph, cluster, op, d)
    share = Fraction(extra_ns * len(running.intersection(mates)), len(mates))
    return math.floor(share + Fraction(1, 2))


def _host(cluster: Cluster, d: int) -> str:
    """Return what a name such as n0:d1 or n0:core:1 has before its device; "" for core:1."""
    *before, _ = cluster.devices[d].name.split(":")
    return ":".join(before[:-1] if before[-1:] == ["core"] else before)


def _has_loaded_costs(graph: nx.DiGraph[str], kind: str) -> bool:
    nodes = graph.nodes.values()
    used = ((node, kind if kind in node["cost_s"] else ANY_KIND) for node in nodes)
    return any(key in node["loaded_cost_s"] for node, key in used)


def _may_run(graph: nx.DiGraph[str], cluster: Cluster, op: str, d: int) -> bool:
    """Return whether the cost of the op is known there and its whole group may use the device."""
    group = graph.nodes[op]["colocate"]
    members = [v for v in graph if v == op or (group and graph.nodes[v]["colocate"] == group)]
    device = cluster.devices[d]
    return all(
        (device.kind in graph.nodes[v]["cost_s"] or ANY_KIND in graph.nodes[v]["cost_s"])
        and (graph.nodes[v]["devices"] is None or device.name in graph.nodes[v]["devices"])
        for v in members
    )


def _resident_bytes(node: Mapping[str, Any]) -> int:
    """Return the bytes that stay on the op's device permanently."""
    return int(node["parameter_bytes"] + node["gradient_bytes"] + node["optimizer_bytes"])


def _held_bytes(graph: nx.DiGraph[str], op: str) -> int:
    """Return the saved bytes that stay to the end, 0 if the graph contains the backward op."""
    phases = {graph.nodes[v]["phase"] for v in graph.successors(op)}
    return 0 if "backward" in phases else int(graph.nodes[op]["saved_bytes"])
