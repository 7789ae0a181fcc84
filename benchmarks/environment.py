"""The machine, devices and versions that results depend on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from envs.hardware.cache_folder import processor
from envs.hardware.discover import available_memory_bytes


def environment() -> dict[str, Any]:
    """Return the machine, its devices and load, and the versions of the libraries."""
    import torch

    import placer
    from envs.hardware.torch_devices import cuda_devices

    found: dict[str, Any] = {
        "placer": placer.__version__,
        "machine": platform.machine(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "free_host_bytes": available_memory_bytes(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "devices": {},
    }
    for name in cuda_devices():
        free, total = torch.cuda.mem_get_info(name)
        found["devices"][name] = {
            "name": torch.cuda.get_device_name(name),
            "free_bytes": free,
            "total_bytes": total,
        }
    for package in ("transformers", "accelerate"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine_name(seen: dict[str, Any]) -> str:
    """Return the first accelerator or the processor, with the number of them, as a file name."""
    devices = [device["name"] for device in seen["devices"].values()]
    name = f"{devices[0]} {len(devices)} devices" if devices else ""
    name = name or f"{seen['processor']} {seen['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
