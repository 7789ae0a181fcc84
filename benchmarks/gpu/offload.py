"""Value of op placement on one accelerator with too little memory and a CPU.

The accelerator memory is limited to shares of the peak of the whole training step. Measured under
each limit, in turn: the first layers that fit on the accelerator with the rest on the CPU, and the
best placement of a search. For inference also accelerate's ``device_map="auto"``, which keeps the
weights that do not fit on the host and sends them in every step.

Without a GPU all of it runs on small models, the CPU and a fake device with slow copies, which only
tests the code: the times say nothing about GPUs. Accelerate then does not send the weights that are
on the host; it computes with them where they are.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.workbench import Workbench, everything_on, in_order, summary
from benchmarks.record import Record, quartiles
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import cuda_devices, torch_device
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from graphs.extract import Workload
from placer.search.candidate import Candidate, distinct
from placer.search.heuristics import first_layers
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, SearchRequest

SHARES = (0.75, 0.5, 0.3)
SEARCH_S = 2.0
REPEATS = 7
ACCELERATE_SHARES = (0.9, 0.7, 0.5, 0.3)
"""Shares of the limit that accelerate may fill with weights; the largest that runs is reported."""
FAKE_SHARES = (1.9,)
"""Shares for the fake device: accelerate reserves room for a layer, most of a small model."""


def found_by_search(problem: Problem, count: int) -> list[Candidate]:
    """Return the best few candidates of a search that fit in memory."""
    found = Portfolio().place(SearchRequest(problem, Budget(seconds=SEARCH_S), seed=0))
    fitting = [plan for plan in found if plan.step_ns < INFEASIBLE_NS]
    return [replace(plan, name=f"placer: {plan.name}") for plan in distinct(fitting, count)]


def capped(
    record: Record, bench: Workbench, peak_bytes: int, share: float, found: dict[str, Any]
) -> None:
    """Measure a model whose accelerator has a share of the memory that the whole step takes."""
    limit = int(share * peak_bytes)
    problem = bench.problem(limit)
    order = -np.arange(problem.op_count, dtype=np.float64)
    layers = in_order(problem, "first layers that fit", first_layers(problem, order))
    found.update(share=share, limit_bytes=limit)
    plans = [layers, *found_by_search(problem, 1)]
    found["rows"] = bench.measured(problem, plans, limit)
    tell(record, found["rows"])


def tell(record: Record, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        record.say(f"  {summary(row)}")


def inference(record: Record, cluster: Cluster, trained: Workload, found: dict[str, Any]) -> None:
    """Compare inference under half of its memory: accelerate's map and the best of a search."""
    own = replace(trained, training=False)
    bench = Workbench(own, cluster)
    state = sum(t.nbytes for t in {id(t): t for t in own.named_state().values()}.values())
    limit = int(0.5 * state) + (100 << 20 if cuda_devices() else 0)
    problem = bench.problem(limit)
    plans = [everything_on(problem, 1), *found_by_search(problem, 2)]
    found.update(limit_bytes=limit, rows=bench.measured(problem, plans, limit))
    tell(record, found["rows"])
    found["accelerate"] = accelerated(own, cluster, limit)


def accelerated(step: Workload, cluster: Cluster, limit_bytes: int) -> dict[str, Any]:
    """Time inference with accelerate's ``device_map="auto"`` under the same limit."""
    from accelerate import dispatch_model

    device = torch_device(cluster.names[0])
    model = copy.deepcopy(step.model).eval()
    is_real = bool(cuda_devices())
    main_device = 0 if is_real else "cpu"  # hooks cannot send tensors to a fake device
    shares = ACCELERATE_SHARES if is_real else FAKE_SHARES
    for share in shares:
        device_map = auto_map(model, cluster, int(share * limit_bytes))
        try:
            with torch_devices.limited({device: limit_bytes}), torch.no_grad():
                placed = dispatch_model(copy.deepcopy(model), device_map, main_device=main_device)
                seconds = list(repeated(placed, step, device))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        return {"share": share, "device_map": device_map, **quartiles(seconds)}
    return {"failure": f"out of memory with {min(shares):.0%} of it for weights, too"}


def auto_map(model: torch.nn.Module, cluster: Cluster, weights_bytes: int) -> dict[str, int | str]:
    """Return accelerate's map for a budget of weight bytes on the first device.

    Accelerate does not know the fake device: there it fills the host and sends the rest to "disk",
    and both are renamed.
    """
    from accelerate import infer_auto_device_map

    first, host = cluster.devices
    is_real = bool(cuda_devices())
    blocks = {type(m).__name__ for n, m in model.named_modules() if re.search(r"\.\d+$", n)}
    found = infer_auto_device_map(
        model,
        max_memory={0: weights_bytes, "cpu": host.memory_bytes}
        if is_real
        else {"cpu": weights_bytes},
        no_split_module_classes=sorted(blocks),
    )
    names = {} if is_real else {"cpu": first.name, "disk": host.name}
    return {module: names.get(device, device) for module, device in found.items()}


def repeated(model: torch.nn.Module, step: Workload, device: torch.device) -> Iterator[float]:
    """Yield the seconds of several steps, without the warm-up."""
    for number in range(REPEATS + 2):
        torch_devices.synchronize(device)
        start = time.perf_counter()
        model(*step.model_inputs, **step.keywords)
        torch_devices.synchronize(device)
        if number >= 2:
            yield time.perf_counter() - start
