"""Planned replicas of small made-up steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import networkx as nx
import torch
from torch import nn
from torch.nn import functional as F

from envs.hardware.cluster import Cluster, Device, Link
from envs.replication import Replication
from graphs.extract import Workload
from graphs.graph import add_edge, add_op, new_graph
from graphs.synthetic.mirror import with_backward
from placer.job import Job, SearchConfig
from placer.replicate.plan import plan_job
from placer.replicate.result import ReplicaPlan
from tests.helpers.clusters import nodes

MB = 10**6
SEARCH = SearchConfig(policy=None, budget="400e")


def layers(count: int = 8, *, towers: str = "a") -> nx.DiGraph[str]:
    """Return towers, one per device, of layers of 1 ms forward, 2 ms backward and 10 MB."""
    forward = new_graph("towers")
    for tower, i in product(towers, range(count)):
        add_op(
            forward,
            f"{tower}{i}",
            cost_s={"*": 1e-3},
            output_bytes=1000,
            parameter_bytes=10 * MB,
        )
        if i:
            add_edge(forward, f"{tower}{i - 1}", f"{tower}{i}")
    return with_backward(forward)


def planned(
    source: Workload | nx.DiGraph[str],
    cluster: Cluster,
    wanted: Replication | None = None,
    search: SearchConfig = SEARCH,
) -> ReplicaPlan:
    replicas = wanted or Replication()
    return plan_job(Job(source=source, cluster=cluster, search=search, replicas=replicas))


def rated(count: int) -> Cluster:
    """Return devices of another machine, with rates."""
    cluster = nodes(1, count)
    devices: Iterator[Device] = (
        replace(device, peak_flop_per_s=1e12, bandwidth_bytes_per_s=1e11)
        for device in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))


def with_rates(cluster: Cluster) -> Cluster:
    """Return a cluster of this machine with rates, memory and a link between all devices."""
    devices = tuple(
        replace(d, memory_bytes=10**9, peak_flop_per_s=1e10, bandwidth_bytes_per_s=1e10)
        for d in cluster.devices
    )
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    return replace(cluster, devices=devices, links=(link,))


def training() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return Workload.of(model, (torch.randn(8, 16), torch.randn(8, 4)), F.mse_loss)
