"""Files of measured clusters, one for each machine, torch version and list of devices."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from envs.cache_folder import cache_folder, host, processor
from envs.cluster import Cluster, Device, cluster_to_toml, load_cluster
from graphs.whole_file import write_whole


def cache_path(prefix: str, about: Sequence[str]) -> Path:
    """Return the cache file of the devices that ``about`` identifies on this machine."""
    here = [host(), processor(), torch.__version__]
    key = hashlib.sha256("\n".join([*here, *about]).encode()).hexdigest()[:16]
    return cache_folder() / f"{prefix}-{key}.toml"


def cached(path: Path, cluster: Cluster) -> Cluster | None:
    """Return the cluster as it was stored, or None if it is missing or incomplete."""
    try:
        known = load_cluster(path)
    except (OSError, ValueError):
        return None
    pairs = itertools.permutations(cluster.names, 2)
    whole = known.names == cluster.names and all(known.link_between(*pair) for pair in pairs)
    return known if whole else None


def store(path: Path, cluster: Cluster) -> None:
    """Store a cluster atomically; a cache that cannot be written is not an error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, cluster_to_toml(cluster))


def filled(cluster: Cluster, measured: Cluster) -> Cluster:
    """Return the cluster with missing values taken from ``measured``."""
    return replace(
        cluster,
        devices=tuple(map(_filled, cluster.devices, measured.devices)),
        links=cluster.links or measured.links,
    )


def _filled(device: Device, measured: Device) -> Device:
    contention = max(device.contention, measured.contention)
    lacking: dict[str, Any] = {
        name: getattr(measured, name)
        for name in ("peak_flop_per_s", "bandwidth_bytes_per_s")
        if math.isnan(getattr(device, name))
    }
    if not device.launch_s and measured.launch_s:
        lacking["launch_s"] = measured.launch_s
    if not lacking:
        return device
    source = "; ".join(text for text in (device.source, measured.source) if text)
    return replace(device, source=source, contention=contention, **lacking)
