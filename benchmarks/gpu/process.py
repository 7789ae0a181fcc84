"""Training steps of a model on one device, in a process of its own, one for each line it reads.

python -m benchmarks.gpu.process "mixture of experts"
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from subprocess import PIPE
from typing import Any

import torch

from benchmarks.gpu.models import models, two_devices
from benchmarks.gpu.rounds import Contestant, in_rounds, mark_ties
from benchmarks.record import quartiles
from envs.hardware import torch_devices
from envs.hardware.torch_devices import torch_device
from envs.measured import TimedStep
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


def in_processes(name: str, results: dict[str, Any], *, small: bool) -> None:
    """Time the same step in several processes, in turns, never two at once."""
    command = [sys.executable, "-m", "benchmarks.gpu.process", name, *["--small"] * small]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            for _ in range(PROCESSES)
        ]

        def end() -> None:
            for process in processes:
                process.kill()

        stack.callback(end)
        late = threading.Timer(LONGEST_S, end)
        stack.callback(late.cancel)
        late.start()
        for process in processes:
            _line(process)  # it is ready
        turns = [Contestant(partial(_turn, process), STEPS) for process in processes]
        measurements = in_rounds(turns)
    results["runs"] = runs = [quartiles(one.wall_s) for one in measurements]
    mark_ties(runs, measurements)
    medians_s = [run["median_s"] for run in runs]
    results["slowest_over_fastest"] = max(medians_s) / min(medians_s)


def _turn(process: subprocess.Popen[str]) -> TimedStep:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return TimedStep(wall_s=float(_line(process)))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended, or was not done after {LONGEST_S:.0f} s")
    return line


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
        for _ in range(WARM_UP):
            run()
        print("ready", flush=True)
        for _ in sys.stdin:
            print(run(), flush=True)


if __name__ == "__main__":
    main()
