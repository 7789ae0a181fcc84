"""Clusters of two torch devices: ``vdev:0`` and ``cpu``."""

from __future__ import annotations

from dataclasses import replace

from envs.hardware.cluster import Cluster, Link
from envs.hardware.discover import discover

MEMORY = {"vdev:0": 1 << 30, "cpu": 1 << 30}


def pair(memory: dict[str, int] | None = None) -> Cluster:
    return discover("vdev:0,cpu", memory or MEMORY)


def linked() -> Cluster:
    cluster = pair()
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    return replace(cluster, links=(link,))
