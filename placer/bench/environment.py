"""What figures depend on: the machine, its devices, versions."""

from __future__ import annotations

import math
import os
import platform
import re
from typing import Any

import numpy as np
import torch

import placer
from envs.cache_folder import processor
from envs.discover import available_memory_bytes
from envs.torch_devices import own_accelerators


def environment() -> dict[str, Any]:
    """What the numbers depend on: machine, devices, versions."""
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
    for name in own_accelerators():
        free, total = torch.cuda.mem_get_info(name)
        found["devices"][name] = {
            "name": torch.cuda.get_device_name(name),
            "free_bytes": free,
            "total_bytes": total,
        }
    for package in ("transformers", "accelerate"):
        try:
            found[package] = __import__(package).__version__
        except ImportError:
            found[package] = None
    return found


def machine_name() -> str:
    """The processor and how many cores of it, or the first GPU, as part of a file name."""
    accelerators = own_accelerators()
    if accelerators:
        name = f"{torch.cuda.get_device_name(accelerators[0])} {len(accelerators)} devices"
    else:
        name = f"{processor()} {len(os.sched_getaffinity(0))} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def plain(value: Any) -> Any:
    """The same as JSON knows it: None for what is no finite number."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
