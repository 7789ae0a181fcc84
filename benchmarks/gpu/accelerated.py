"""Inference by accelerate's ``device_map="auto"``, in turns beside placements.

It keeps the weights that do not fit on the host and sends them in every step.
"""

from __future__ import annotations

import copy
import re
import time
from functools import partial
from typing import Any, Final

import torch

from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import torch_device, unless_out_of_memory
from envs.measured import Failure, TimedStep
from envs.torch_runtime.executor import steady_step_s
from graphs.extract import Workload

NAME: Final = 'accelerate, device_map="auto"'
SHARES: Final = (0.9, 0.7, 0.5, 0.3)
"""Shares of the limit that weights may fill; the largest that runs is used."""


class Accelerated:
    """The model as accelerate runs it, dispatched anew in each turn under the limit in force."""

    def __init__(self, step: Workload, cluster: Cluster, limit_bytes: int) -> None:
        self.shares = list(SHARES)
        self._model = copy.deepcopy(step.model).eval()
        self._step = step
        self._cluster = cluster
        self._limit_bytes = limit_bytes

    @property
    def device_map(self) -> dict[str, int | str]:
        """Return the map of the share that is used."""
        return auto_map(self._model, self._cluster, int(self.shares[0] * self._limit_bytes))

    def run(self) -> TimedStep | Failure:
        """Run a few steps; with less weights on the device if they run out of memory."""
        name = self._cluster.names[0]
        device = torch_device(name)
        while self.shares:
            torch_devices.reset_peak(device)
            wall_s = unless_out_of_memory(partial(self._wall_s, device), device)
            peak = torch_devices.peak_bytes(device)
            torch_devices.release(device)
            if wall_s is not None:
                return TimedStep(wall_s=wall_s, peak_memory_bytes={name: peak} if peak else {})
            del self.shares[0]
        return Failure(reason=f"out of memory with {SHARES[-1]:.0%} of it for weights, too")

    @torch.no_grad()
    def _wall_s(self, device: torch.device) -> float:
        from accelerate import dispatch_model

        placed = dispatch_model(copy.deepcopy(self._model), self.device_map, main_device=0)

        def one_s() -> float:
            torch_devices.synchronize(device)
            start = time.perf_counter()
            placed(*self._step.model_inputs, **self._step.keywords)
            torch_devices.synchronize(device)
            return time.perf_counter() - start

        return steady_step_s(one_s(), one_s)


def auto_map(model: torch.nn.Module, cluster: Cluster, weights_bytes: int) -> dict[str, Any]:
    """Return accelerate's map for a budget of weight bytes on the first device."""
    from accelerate import infer_auto_device_map

    blocks = {type(m).__name__ for n, m in model.named_modules() if re.search(r"\.\d+$", n)}
    return dict(
        infer_auto_device_map(
            model,
            max_memory={0: weights_bytes, "cpu": cluster.devices[1].memory_bytes},
            no_split_module_classes=sorted(blocks),
        )
    )
