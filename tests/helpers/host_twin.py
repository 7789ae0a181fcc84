"""Specification of the simulator for clusters with hosts, plain and slow, from graph and cluster.

One list of ops in the order of issue decides everything; ``twin_host_step`` goes through it once.
"""

from __future__ import annotations

import math

import networkx as nx

from envs.hardware.cluster import Cluster
from envs.problem import HORIZON_NS
from graphs.graph import ANY_KIND
from tests.helpers.simulator_twin import (
    Sending,
    Step,
    _held_bytes,
    _link,
    _may_run,
    _ports,
    _resident_bytes,
    _sendings,
    _transfer_ns,
)


def is_cpu(cluster: Cluster, d: int) -> bool:
    device = cluster.devices[d]
    kind = device.kind.split("*")[0].split(":")[0]
    return "cpu" in (device.name, kind) or device.name.startswith("core:")


def twin_backward(graph: nx.DiGraph[str], cluster: Cluster) -> dict[int, int]:
    """Return the forward op of every op that autograd issues."""
    ids = list(graph)
    order = list(nx.lexicographical_topological_sort(graph, ids.index))
    forward = {
        op for op in ids
        if graph.nodes[op]["phase"] == "forward"
        or any(graph.nodes[v]["phase"] == "forward" for v in nx.descendants(graph, op))
    }  # fmt: skip
    if not forward or not any(host.autograd for host in cluster.hosts):
        return {}
    of: dict[int, int] = {}
    for op in order:
        if op in forward:
            continue
        read = sorted(graph.predecessors(op), key=ids.index)
        before = [u for u in read if u in forward]
        named = op.replace("backward/", "")
        if named != op and named in forward:
            twin = ids.index(named)
        elif before:
            twin = ids.index(max(before, key=order.index))
        elif read:
            twin = of[ids.index(read[0])]
        else:
            twin = ids.index(next(op for op in order if op in forward))
        of[ids.index(op)] = twin
    return of


def twin_issue_order(graph: nx.DiGraph[str], cluster: Cluster, priority: list[float]) -> list[int]:
    ids = list(graph)
    backward = twin_backward(graph, cluster)
    order: list[int] = []
    while len(order) < len(ids):
        ready = [
            i for i, op in enumerate(ids)
            if i not in order and all(ids.index(u) in order for u in graph.predecessors(op))
        ]  # fmt: skip
        forward = [i for i in ready if i not in backward]
        updates = [i for i in ready if graph.nodes[ids[i]]["phase"] == "optimizer"]
        if forward:
            order.append(min(forward, key=lambda i: (-priority[i], i)))
        elif updates:
            order.append(min(updates))
        else:
            order.append(min(ready, key=lambda i: (-order.index(backward[i]), i)))
    return order


def twin_host_step(
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
    if any(not _may_run(graph, cluster, op, devices[index[op]]) for op in ids):
        return Step(blocked=True)
    for u, v in edge_number:
        if devices[u] != devices[v] and _link(cluster, names, devices[u], devices[v]) is None:
            return Step(blocked=True)

    thread: dict[int, object] = {d: ("alone", d) for d in range(len(names))}
    overlaps = dict.fromkeys(range(len(names)), False)
    for host in cluster.hosts:
        for name in host.devices:
            thread[names.index(name)] = host
            overlaps[names.index(name)] = host.overlap
    named = {name for host in cluster.hosts for name in host.devices}
    waits = [names[d] not in named or is_cpu(cluster, d) for d in range(len(names))]

    step = Step()
    used = [sum(_resident_bytes(n) for n, d in zip(nodes, devices, strict=True) if d == k)
            for k in range(len(names))]  # fmt: skip
    step.peak_bytes = list(used)
    clock: dict[object, int] = dict.fromkeys(thread.values(), 0)
    written: dict[object, int] = dict.fromkeys(thread.values(), 0)  # by its other thread
    awaited: dict[int, int] = {}  # by sending: until then the thread of its readers waits
    free = [0] * len(names)
    port_free: dict[object, int] = {}
    carrier: dict[tuple[int, int], Sending] = {}
    output_users: list[set[object]] = [set() for _ in ids]
    copy_users: dict[int, set[int]] = {}

    def allocate(d: int, size: int) -> None:
        used[d] += size
        step.peak_bytes[d] = max(step.peak_bytes[d], used[d])

    def issue_ns(s: Sending) -> int:
        ends = [d for d in (s.source, s.destination) if not waits[d]]
        return max([round(cluster.devices[d].launch_s * 1e9) for d in ends], default=0)

    def taking_ns(seconds: float) -> int:
        return round(min(seconds * 1e9, float(HORIZON_NS)))

    def written_ns(s: Sending, size: int) -> int:
        rate = cluster.devices[s.source].bandwidth_bytes_per_s / 2
        return 0 if math.isnan(rate) else taking_ns(size / rate)

    def send_staged(s: Sending) -> None:
        """Write what goes to GPUs of the same thread: pieces of 16 MiB of at most 64 MiB."""
        link, own = _link(cluster, names, s.source, s.destination), thread[s.source]
        assert link is not None
        if s.size <= 1 << 20:  # too small for the other thread
            clock[own] += written_ns(s, s.size)
            send(s, clock[own])
            return
        begin, first = max(clock[own], written[own]), min(s.size, 16 << 20)
        written[own] = begin + written_ns(s, s.size)
        last_piece_waits = written[own] - taking_ns((s.size - first) / link.bandwidth_bytes_per_s)
        send(s, max(begin + written_ns(s, first), last_piece_waits))
        if s.size > 64 << 20:
            rest_ns = taking_ns((64 << 20) / link.bandwidth_bytes_per_s)
            written[own] = max(written[own], s.end_ns - rest_ns)
        awaited[id(s)] = written[own]

    def send_beside(s: Sending) -> None:
        """Send to another device while ops go on; readers of other threads wait for the end."""
        own, from_host = thread[s.source], waits[s.source] and not waits[s.destination]
        if own != thread[s.destination] and from_host:
            clock[own] += written_ns(s, s.size)
            awaited[id(s)] = clock[own]  # sent by the thread of its first reader
            return
        clock[own] += issue_ns(s)
        if from_host:
            send_staged(s)
            return
        send(s, max(clock[own], step.end_ns[s.producer]))
        if own != thread[s.destination]:
            awaited[id(s)] = s.end_ns

    def bring(s: Sending) -> None:
        """Let the thread of a reader wait for what has not come by itself, or send it."""
        d, own = s.destination, thread[s.destination]
        clock[own] = max(clock[own], awaited.get(id(s), 0))
        if s.start_ns >= 0:
            return
        is_in_line = id(s) not in awaited
        is_waited_for = is_in_line and (waits[s.source] or waits[d])
        if not is_waited_for:
            clock[own] += issue_ns(s)
        send(s, max(clock[own], free[d], free[s.source] if is_in_line else 0))
        free[d] = s.end_ns
        if is_in_line:
            free[s.source] = s.end_ns
        if is_waited_for:
            clock[own] = s.end_ns

    def drop(u: int, user: object) -> None:
        output_users[u].discard(user)
        if not output_users[u]:
            used[devices[u]] -= nodes[u]["output_bytes"]

    def send(s: Sending, now: int) -> None:
        ports = _ports(cluster, names, s)
        s.request_ns = step.end_ns[s.producer]
        s.start_ns = max([now, *(port_free.get(port, 0) for port in ports)])
        s.end_ns = s.start_ns + _transfer_ns(cluster, names, s)
        port_free.update(dict.fromkeys(ports, s.end_ns))
        step.sendings.append(s)
        allocate(s.destination, s.size)
        drop(s.producer, id(s))

    for i in twin_issue_order(graph, cluster, priority):
        d = devices[i]
        arrivals = [0]
        for u in producers[i]:
            if devices[u] == d:
                continue
            s = carrier[u, i]
            bring(s)
            arrivals.append(s.end_ns)
        launch_s = cluster.devices[d].launch_s
        costs, kind = nodes[i]["cost_s"], cluster.devices[d].kind
        if not waits[d]:
            known = nodes[i]["launch_s"].get(kind if kind in costs else ANY_KIND, launch_s)
            clock[thread[d]] += round(known * 1e9)
        step.start_ns[i] = max(clock[thread[d]], free[d], *arrivals)
        cost_s = costs.get(kind, costs.get(ANY_KIND))
        cost_ns = round(float(cost_s + (launch_s if waits[d] else 0.0)) * 1e9)
        free[d] = step.end_ns[i] = step.start_ns[i] + cost_ns
        if waits[d]:
            clock[thread[d]] = free[d]
        allocate(
            d, nodes[i]["output_bytes"] + nodes[i]["workspace_bytes"] + _held_bytes(graph, ids[i])
        )
        used[d] -= nodes[i]["workspace_bytes"]
        for u in producers[i]:
            if devices[u] == d:
                drop(u, i)
            else:
                s = carrier[u, i]
                copy_users[id(s)].discard(i)
                if not copy_users[id(s)]:
                    used[d] -= s.size
        sendings = _sendings(graph, cluster, ids, i, consumers[i], devices, edge_number)
        output_users[i] = {v for v in consumers[i] if devices[v] == d} | {id(s) for s in sendings}
        for s in sendings:
            copy_users[id(s)] = set(s.consumers)
            carrier.update({(i, v): s for v in s.consumers})
        for s in sendings if overlaps[d] else ():
            send_beside(s)
    step.step_ns = max(step.end_ns.values(), default=0)
    return step
