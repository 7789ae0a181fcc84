"""Value of op placement on one accelerator with too little memory and a CPU.

The accelerator memory is limited to shares of the peak of the whole training step. Measured under
each limit, in turn: the most first layers that fit on the accelerator, found by trying, with the
rest on the CPU, and the best placement of a search. For inference also accelerate's
``device_map="auto"``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.gpu.accelerated import Accelerated
from benchmarks.gpu.workbench import Workbench, everything_on, in_order, placement, summary
from benchmarks.record import Record
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import torch_device
from envs.problem import Ints, Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from envs.torch_runtime.executor import placed_module
from graphs.extract import Workload
from placer.search.candidate import Candidate, distinct
from placer.search.heuristics import first_layers, layer_numbers
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, SearchRequest

SEARCH_S = 2.0
LIBRARIES_BYTES = 100 << 20
"""Room for scratch memory of libraries beside the weights; less for models smaller than that."""


def found_by_search(problem: Problem, count: int) -> list[Candidate]:
    """Return the best few candidates of a search that fit in memory."""
    candidates = Portfolio().place(SearchRequest(problem, Budget(seconds=SEARCH_S), seed=0))
    fitting = [plan for plan in candidates if plan.step_ns < INFEASIBLE_NS]
    return [replace(plan, name=f"placer: {plan.name}") for plan in distinct(fitting, count)]


def capped(
    record: Record, bench: Workbench, peak_bytes: int, share: float, results: dict[str, Any]
) -> None:
    """Measure a model whose accelerator has a share of the memory that the whole step takes."""
    limit = int(share * peak_bytes)
    problem = bench.problem(limit)
    layers = in_order(problem, "first layers that fit", layers_that_fit(bench, peak_bytes, limit))
    results.update(share=share, limit_bytes=limit)
    plans = [layers, *found_by_search(problem, 1)]
    results["rows"] = bench.measured(problem, plans, limit)
    print_rows(record, results["rows"])


def layers_that_fit(bench: Workbench, peak_bytes: int, limit_bytes: int) -> Ints:
    """Return devices (N,) with the most first layers on the accelerator that fit when they run.

    They are tried one number after the other, from those that fit by prediction, which is scaled
    to what the whole step took.
    """
    problem = bench.problem()
    alone = everything_on(problem, 0)
    whole_bytes = int(Simulator(problem).run(alone.devices, alone.priority).peak_bytes[0])
    scaled = bench.problem(limit_bytes * whole_bytes // peak_bytes)
    order = -np.arange(problem.op_count, dtype=np.float64)
    predicted = first_layers(scaled, order)
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


def print_rows(record: Record, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        record.say(f"  {summary(row)}")


def inference(record: Record, cluster: Cluster, trained: Workload, results: dict[str, Any]) -> None:
    """Compare inference under half of its memory: accelerate's map and the best of a search."""
    step = replace(trained, training=False)
    bench = Workbench(step, cluster)
    state = sum(t.nbytes for t in {id(t): t for t in step.named_state().values()}.values())
    limit = int(0.5 * state) + min(LIBRARIES_BYTES, state // 4)
    problem = bench.problem(limit)
    plans = [everything_on(problem, 1), *found_by_search(problem, 1)]
    beside = Accelerated(step, cluster, limit)
    results.update(limit_bytes=limit, rows=bench.measured(problem, plans, limit, beside=beside))
    print_rows(record, results["rows"])
