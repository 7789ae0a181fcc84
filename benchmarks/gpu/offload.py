"""Value of op placement on one accelerator with too little memory and a CPU.

The accelerator memory is limited to shares of the peak of the whole training step. Measured under
each limit, in turn: the most first layers that fit on the accelerator, found by trying, with the
rest on the CPU, and the best placement of a search. For inference also accelerate's
``device_map="auto"``, which keeps the weights that do not fit on the host and sends them in every
step.

Without a GPU all of it runs on small models, the CPU and a fake device with slow copies, which only
tests the code: the times say nothing about GPUs. Accelerate then does not send the weights that are
on the host; it computes with them where they are.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.workbench import Workbench, everything_on, in_order, placement, summary
from benchmarks.record import Record, quartiles
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import cuda_devices, torch_device
from envs.problem import Ints, Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from envs.torch_runtime.executor import placed_module
from graphs.extract import Workload
from placer.search.candidate import Candidate, distinct
from placer.search.heuristics import first_layers, layer_numbers
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
    layers = in_order(problem, "first layers that fit", layers_that_fit(bench, peak_bytes, limit))
    found.update(share=share, limit_bytes=limit)
    plans = [layers, *found_by_search(problem, 1)]
    found["rows"] = bench.measured(problem, plans, limit)
    tell(record, found["rows"])


def layers_that_fit(bench: Workbench, peak_bytes: int, limit_bytes: int) -> Ints:
    """Return devices (N,) with the most first layers on the accelerator that fit when they run.

    They are tried one number after the other, from those that fit by prediction, which is scaled
    to what the whole step took. Where no limit is enforced the prediction decides.
    """
    problem = bench.problem()
    alone = everything_on(problem, 0)
    whole_bytes = int(Simulator(problem).run(alone.devices, alone.priority).peak_bytes[0])
    scaled = bench.problem(
        limit_bytes * whole_bytes // peak_bytes if cuda_devices() else limit_bytes
    )
    order = -np.arange(problem.op_count, dtype=np.float64)
    predicted = first_layers(scaled, order)
    if not cuda_devices():
        return predicted
    number = layer_numbers(problem)

    def first(count: int) -> Ints:
        return np.where((number < count) & problem.allowed[:, 0], 0, 1).astype(np.int32)

    guess = int(number[predicted == 0].max(initial=-1)) + 1
    return first(
        most_that_fit(
            lambda count: fits(bench, problem, first(count), limit_bytes),
            guess,
            int(number.max()) + 1,
        )
    )


def most_that_fit(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Return the largest number up to ``most`` that fits, 0 if none does; all below it fit, too.

    From the guess on steps get longer, and then shorter.
    """
    low, high, step = 0, most + 1, 1  # low fits, high does not
    trial = min(max(guess, 1), most)
    while low + 1 < high:
        trial = min(max(trial, low + 1), high - 1)
        if fits(trial):
            low = trial
        else:
            high = trial
        if low and high <= most:
            trial = (low + high) // 2
        else:
            trial += step if low else -step
            step *= 2
    return low


def fits(bench: Workbench, problem: Problem, devices: Ints, limit_bytes: int) -> bool:
    """Run two steps with ops in the order of the model; return whether memory sufficed."""
    plan = placement(problem, in_order(problem, "", devices))
    names = [torch_device(name) for name in problem.cluster.names]
    calls, step = bench.runtime.calls, copy.deepcopy(bench.extraction.step)

    def work() -> bool:
        with torch_devices.limited({names[0]: limit_bytes}):
            placed = placed_module(
                replace(bench.extraction, step=step),
                calls,
                [names[d] for d in plan.devices],
                plan.priority,
            )
            for _ in range(2):
                placed.zero_grad(set_to_none=True)
                placed.step(*step.step_inputs, **step.keywords)
            for name in names:
                torch_devices.synchronize(name)
        return True

    return bool(torch_devices.unless_out_of_memory(work, names[0]))


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
