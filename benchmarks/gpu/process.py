"""Training steps of a model on one device, in a process of their own; prints their quartiles.

python -m benchmarks.gpu.process "mixture of experts"
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import models, two_devices
from benchmarks.record import quartiles
from envs.hardware import torch_devices
from envs.hardware.torch_devices import torch_device
from graphs.extract import Workload
from graphs.workload import LossModule

PROCESSES = 3
STEPS = 15
WARM_UP = 3
LONGEST_S = 120.0


def trained(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    keywords: dict[str, Any],
    devices: Sequence[torch.device],
) -> float:
    """Return the seconds of one training step, until all devices are done."""
    for device in devices:
        torch_devices.synchronize(device)
    start = time.perf_counter()
    module.zero_grad(set_to_none=True)
    module(*inputs, **keywords).backward()
    for device in devices:
        torch_devices.synchronize(device)
    return time.perf_counter() - start


def on_device(step: Workload, device: torch.device) -> tuple[LossModule, list[Any], dict[str, Any]]:
    """Return a copy of the model with its loss, and its inputs, on a device."""

    def there(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    model = LossModule(copy.deepcopy(step)).to(device)
    keywords = {name: there(leaf) for name, leaf in step.keywords.items()}
    return model, [there(leaf) for leaf in step.inputs], keywords


def in_processes(name: str, found: dict[str, Any], *, small: bool) -> None:
    """Time the same step in several processes, one after the other."""
    command = [sys.executable, "-m", "benchmarks.gpu.process", name, *["--small"] * small]
    found["runs"] = runs = [
        json.loads(
            subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S
            ).stdout
        )
        for _ in range(PROCESSES)
    ]
    medians_s = [run["median_s"] for run in runs]
    found["slowest_over_fastest"] = max(medians_s) / min(medians_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps of one model on one device.")
    parser.add_argument("model", choices=models(small=True))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    with two_devices() as cluster:
        device = torch_device(cluster.names[0])
        step = models(small=options.small)[options.model]()
        module, inputs, keywords = on_device(step, device)
        run = partial(trained, module, inputs, keywords, [device])
        seconds = [run() for _ in range(WARM_UP + STEPS)][WARM_UP:]
    print(json.dumps(quartiles(seconds)))


if __name__ == "__main__":
    main()
