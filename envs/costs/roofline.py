"""Op costs on devices that are not on this machine: the roofline of their rates.

An op takes as long as its arithmetic or its memory traffic, whichever is slower (S. Williams, A.
Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52 (4), 2009). A device has a single peak: give that of the dtype that the
model computes in. Rates achieved in practice predict better than those of the data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from envs.hardware.cluster import Cluster, Device, load_cluster
from envs.hardware.discover import (
    check_cores,
    check_devices,
    discover,
    is_here,
    is_local_core_set,
    missing_reason,
)
from graphs.graph import attributes_of

SOURCE: Final = "roofline of the cluster's rates"
RATES: Final = {"peak_flop_per_s": "60e12", "bandwidth_bytes_per_s": "3e12"}  # with examples


def roofline_s(
    flops: NDArray[np.int64], moved_bytes: NDArray[np.int64], device: Device
) -> NDArray[np.float64]:
    """Return the seconds of ops on a device, (N,): the slower of arithmetic and memory traffic.

    The device's ``launch_s`` is not included: :class:`envs.problem.Problem` adds it to every op.

    >>> gpu = Device(name="gpu:0", kind="gpu", memory_bytes=0, launch_s=5e-6,
    ...              peak_flop_per_s=1e12, bandwidth_bytes_per_s=1e9)
    >>> roofline_s(np.array([2_000_000_000, 0]), np.array([1_000_000, 3_000_000]), gpu).tolist()
    [0.002, 0.003]
    """
    return np.maximum(flops / device.peak_flop_per_s, moved_bytes / device.bandwidth_bytes_per_s)


def roofline_costs(
    graph: nx.DiGraph[str], devices: Sequence[Device]
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op on each kind of these devices, {kind: (N,)}."""
    nodes = [attributes_of(graph, op_id) for op_id in graph]
    flops = np.array([node["flops"] for node in nodes], np.int64)
    moved_bytes = np.array([node["moved_bytes"] for node in nodes], np.int64)
    one_of = {device.kind: device for device in devices}
    return {kind: roofline_s(flops, moved_bytes, device) for kind, device in one_of.items()}


def check_cluster(cluster: Cluster) -> None:
    """Check that every device is on this machine or has rates.

    Torch devices run only if all devices are on this machine; otherwise they need rates, too.
    """
    if all(map(is_here, cluster.names)):
        check_devices(cluster.names)
        return
    check_cores([name for name in cluster.names if is_local_core_set(name)])
    check_rates([device for device in cluster.devices if not is_local_core_set(device.name)])


def cluster_of(
    devices: str | Path | Cluster,
    memory: Mapping[str, int] | None = None,
    *,
    has_costs: bool = False,
) -> Cluster:
    """Return the devices to place on.

    Args:
        devices: a cluster, a cluster file (a path, or text that ends in ``.toml``), or names of
            devices of this machine, see :func:`envs.hardware.discover.discover`.
        memory: {device name: bytes} that may be used of named devices.
        has_costs: whether op costs are known, so that the devices may be anywhere.
    """
    if isinstance(devices, str) and not devices.endswith(".toml"):
        if has_costs:
            raise ValueError("a graph has no devices of its own: give a cluster, or its file")
        return discover(devices, memory)
    if memory:
        raise ValueError("a cluster says how much memory its devices have: leave memory out")
    if isinstance(devices, Cluster):
        return devices
    if not isinstance(devices, str | Path):
        raise TypeError(
            "devices are a string such as 'core:0,core:1', a cluster file or a Cluster, not "
            f"{type(devices).__name__}"
        )
    cluster = load_cluster(Path(devices))
    if not has_costs:
        try:
            check_cluster(cluster)
        except ValueError as error:
            raise ValueError(f"{devices}: {error}") from error
    return cluster


def check_rates(devices: Sequence[Device]) -> None:
    """Check that devices have rates, equal for all devices of one kind."""
    first_of: dict[str, Device] = {}
    for device in devices:
        lacking = [name for name in RATES if math.isnan(getattr(device, name))]
        if lacking:
            examples = " and ".join(f"{name} = {RATES[name]}" for name in lacking)
            reason = missing_reason(device.name) or (
                f"{device.name} is here, but other devices of the cluster are not, so it is "
                "simulated like them"
            )
            raise ValueError(
                f"{reason}. A device that is simulated needs rates: add to the [[device]] "
                f"{device.name!r} such lines as {examples}, from its data sheet or, better, "
                "measured there"
            )
        first = first_of.setdefault(device.kind, device)
        for name in RATES:
            rates = getattr(first, name), getattr(device, name)
            if rates[0] != rates[1]:
                raise ValueError(
                    f"devices {first.name!r} and {device.name!r} are both of kind {device.kind!r}, "
                    f"but {name} is {rates[0]:.4g} and {rates[1]:.4g}: op costs are by kind, give "
                    "them different ones"
                )
