"""Value of op placement on one accelerator with too little memory and a CPU.

    python -m benchmarks.gpu.offload --out offload.json

For each model the accelerator memory is limited to shares of the peak of the whole training step.
Measured without a limit: the whole step on either device. Measured under each limit, in turn: the
first layers that fit on the accelerator with the rest on the CPU, and the best placements of a
search. For inference also accelerate's ``device_map="auto"``, which keeps the weights that do not
fit on the host and sends them in every step, compared with the best search result for inference.

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

from benchmarks.gpu.models import models, two_devices
from benchmarks.gpu.workbench import Workbench, arguments, everything_on, in_order, summary
from benchmarks.record import Record, quartiles
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import cuda_devices, torch_device
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from graphs.extract import Workload
from placer.search.candidate import Candidate, distinct
from placer.search.compilation import load_compiled_code
from placer.search.heuristics import first_layers
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, SearchRequest

SHARES = (0.75, 0.5, 0.3)
SEARCH_S = 2.0
RUN = 2
"""Number of the best search results that are measured."""
REPEATS = 7
ACCELERATE_SHARES = (0.9, 0.7, 0.5, 0.3)
"""Shares of the limit that accelerate may fill with weights; the largest that runs is reported."""
FAKE_SHARES = (1.9,)
"""Shares for the fake device: accelerate reserves room for a layer, most of a small model."""


def found_by_search(problem: Problem, seed: int = 0) -> list[Candidate]:
    """Return the best few candidates of a search that fit in memory."""
    found = Portfolio().place(SearchRequest(problem, Budget(seconds=SEARCH_S), seed=seed))
    fitting = [plan for plan in found if plan.step_ns < INFEASIBLE_NS]
    return [replace(plan, name=f"placer: {plan.name}") for plan in distinct(fitting, RUN)]


def offload(record: Record, name: str, bench: Workbench) -> None:
    """Measure one model under all limits, each as one part of the record."""
    peak: list[int] = []

    def unlimited(found: dict[str, Any]) -> None:
        problem = bench.problem()
        plans = [everything_on(problem, d) for d in range(problem.device_count)]
        rows = bench.measured(problem, plans)
        seen = rows[0]["measured_peak_bytes"].get(problem.cluster.names[0])
        peak.append(seen or rows[0]["predicted_peak_bytes"][0])
        state = bench.extraction.step.named_state().values()
        found.update(
            ops=problem.op_count,
            joint_ops=bench.extraction.program.op_count,
            state_bytes=sum(t.nbytes for t in {id(t): t for t in state}.values()),
            peak_bytes=peak[0],
            peak_was_measured=seen is not None,
            rows=rows,
            **bench.seconds,
        )
        tell(record, rows)

    record.part(f"{name}: no limit", unlimited)
    for share in SHARES if peak else ():

        def capped(found: dict[str, Any], share: float = share) -> None:
            limit = int(share * peak[0])
            problem = bench.problem(limit)
            order = -np.arange(problem.op_count, dtype=np.float64)
            layers = first_layers(problem, order)
            plans = [in_order(problem, "first layers that fit", layers), *found_by_search(problem)]
            found.update(share=share, limit_bytes=limit)
            found["rows"] = bench.measured(problem, plans, limit)
            tell(record, found["rows"])

        record.part(f"{name}: {share:.0%}", capped)


def tell(record: Record, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        record.say(f"  {summary(row)}")


def inference(record: Record, cluster: Cluster, name: str, step: Workload) -> None:
    """Compare inference under half of its memory: accelerate's map and the best of a search."""

    def compared(found: dict[str, Any]) -> None:
        own = replace(step, training=False)
        bench = Workbench(own, cluster)
        state = sum(t.nbytes for t in {id(t): t for t in own.named_state().values()}.values())
        limit = int(0.5 * state) + (100 << 20 if cuda_devices() else 0)
        problem = bench.problem(limit)
        plans = [everything_on(problem, 1), *found_by_search(problem)]
        found.update(limit_bytes=limit, rows=bench.measured(problem, plans, limit))
        tell(record, found["rows"])
        found["accelerate"] = accelerated(own, cluster, limit)

    record.part(f"{name}: inference, 50% of the weights", compared)


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


def run(record: Record, cluster: Cluster, benches: dict[str, Workbench], *, small: bool) -> None:
    """Run all models, as far as time allows; compare with accelerate for two of them.

    ``benches`` maps model names to workbenches; a missing one is made.
    """
    record.part("compiled code", lambda _: load_compiled_code())
    for name, make in models(small=small).items():

        def prepared(_: dict[str, Any], name: str = name, make: Any = make) -> None:
            benches[name] = Workbench(make(), cluster)

        if name not in benches:
            record.part(f"{name}: profile", prepared)
        if name in benches:
            offload(record, name, benches[name])
            if name in ("mixture of experts", "language model"):
                inference(record, cluster, name, benches[name].extraction.step)
            del benches[name]  # its model may take gigabytes


def main() -> None:
    options = arguments("One accelerator with too little memory, and a CPU.", 290)
    record = Record(options.out, options.limit)
    with two_devices() as cluster:
        run(record, cluster, {}, small=options.small or not cuda_devices())
    record.save()
    record.say("done" if options.out is None else f"done: {options.out}")


if __name__ == "__main__":
    main()
