"""Memory that a step needs on torch devices beyond what its call graph shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from envs.cluster import Cluster, Device
from envs.host_names import is_core

FRAGMENTED_SHARE: Final = 0.08
"""Share of a device's memory lost in gaps between tensors; a guess, 5 to 15 % are usual."""
LIBRARY_BYTES: Final = 96 << 20
"""Scratch memory of cuBLAS (32 MiB on recent GPUs, for each of two streams) and cuDNN."""


def plannable(cluster: Cluster) -> Cluster:
    """Return the cluster with torch devices' memory reduced to what placements may use.

    The rest is reserved for fragmentation and libraries. It does not include the context of a CUDA
    device, which is already allocated when free memory is queried.
    """
    return replace(cluster, devices=tuple(map(_plannable, cluster.devices)))


def _plannable(device: Device) -> Device:
    if is_core(device.name):
        return device
    libraries = LIBRARY_BYTES if device.name.startswith("cuda") else 0
    left = int(device.memory_bytes * (1 - FRAGMENTED_SHARE)) - libraries
    return replace(device, memory_bytes=max(left, 0))
