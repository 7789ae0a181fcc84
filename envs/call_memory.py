"""What a step takes on torch's devices beyond what the graph of its calls says."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from envs.cluster import Cluster, Device
from envs.host_names import is_core

FRAGMENTED_SHARE: Final = 0.08
"""Part of a device's memory that lies in gaps between tensors; a guess, 5 to 15 % are usual."""
LIBRARY_BYTES: Final = 96 << 20
"""Scratch memory of cuBLAS (32 MiB on recent GPUs, for each of two streams) and cuDNN."""


def plannable(cluster: Cluster) -> Cluster:
    """The cluster with the memory of torch's devices that placements may be planned for.

    The rest is left for gaps and for libraries. The context of a CUDA device is in neither: it is
    taken before free memory is asked for.
    """
    return replace(cluster, devices=tuple(map(_plannable, cluster.devices)))


def _plannable(device: Device) -> Device:
    if is_core(device.name):
        return device
    libraries = LIBRARY_BYTES if device.name.startswith("cuda") else 0
    left = int(device.memory_bytes * (1 - FRAGMENTED_SHARE)) - libraries
    return replace(device, memory_bytes=max(left, 0))
