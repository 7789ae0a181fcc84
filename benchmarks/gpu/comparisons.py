"""Two ways to run the same step, in the same rounds: placed, compiled, overlapped, in processes."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch

from benchmarks.gpu import offload
from benchmarks.gpu.process import on_device, trained
from benchmarks.gpu.rounds import as_compared, compared
from benchmarks.gpu.workbench import Workbench, at_random, everything_on, placement
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import torch_device
from envs.measured import Failure
from envs.problem import Problem
from envs.simulator import Simulator
from envs.torch_runtime.executor import TorchExecutor
from envs.torch_runtime.worker_executor import WorkerExecutor
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph
from graphs.optimizer import Optimizer
from placer.search.candidate import Candidate

COMPARED_S: Final = 5.0
OVERLAP_SHARES: Final = (0.5, 0.9)
OVERLAP_S: Final = 2.0
HALF: Final = 0.5
PROCESS_SHARE: Final = 0.97
"""Share of the groups in the placement that one thread drives, and a process for each device."""
VISITS: Final = 2
TURNS: Final = 2
"""Turns of such a placement in each visit of the executor."""


def overhead(bench: Workbench, cluster: Cluster, results: dict[str, Any]) -> None:
    """Compare the plain model with the placed module, on the accelerator."""
    device = torch_device(cluster.names[0])
    step, calls = bench.extraction.step, bench.runtime.calls
    devices = calls.devices_of_calls([device] * len(calls.graph))
    placed = PlacedModule(_copied(bench), devices)
    eager, inputs, keywords = on_device(step, device)
    steps = {
        "eager": partial(trained, eager, inputs, keywords, [device]),
        "placed": partial(trained, placed, inputs, keywords, [device]),
    }
    results.update(compared(steps, COMPARED_S))


def compiled(
    bench: Workbench, cluster: Cluster, results: dict[str, Any], backend: str = "inductor"
) -> None:
    """Compare the plain model with itself after ``torch.compile``, on the accelerator."""
    device = torch_device(cluster.names[0])
    eager, inputs, keywords = on_device(bench.extraction.step, device)
    fast: Any = torch.compile(eager, backend=backend)  # a module, too
    steps = {
        name: partial(trained, module, inputs, keywords, [device])
        for name, module in {"eager": eager, "compiled": fast}.items()
    }
    results.update(compared(steps, COMPARED_S))


def overlapping(bench: Workbench, cluster: Cluster, results: dict[str, Any]) -> None:
    """Compare in-line and overlapped copies: random placements, and one for half the memory."""
    problem = bench.problem()
    alone = everything_on(problem, 0)
    peak_bytes = Simulator(problem).run(alone.devices, alone.priority).peak_bytes[0]
    cramped = bench.problem(int(HALF * peak_bytes))
    plans = at_random(problem, OVERLAP_SHARES)
    plans += [replace(plan, name="half the memory") for plan in offload.found_by_search(cramped, 1)]
    results["rows"] = [_with_overlap(bench, cluster, problem, plan) for plan in plans]


def _with_overlap(
    bench: Workbench, cluster: Cluster, problem: Problem, plan: Candidate
) -> dict[str, Any]:
    names = [torch_device(name) for name in cluster.names]
    step, calls = bench.extraction.step, bench.runtime.calls
    placed = placement(problem, plan)
    devices = calls.devices_of_calls([names[d] for d in placed.devices])
    order = calls.launch_order(placed.priority)
    modules = {
        name: PlacedModule(_copied(bench), devices, order, overlap=overlap)
        for name, overlap in (("in line", False), ("overlapping", True))
    }
    steps = {
        name: partial(trained, module, list(step.inputs), dict(step.keywords), names)
        for name, module in modules.items()
    }
    return {
        "name": plan.name,
        "transfers": modules["in line"].transfers,
        **compared(steps, OVERLAP_S, warm_up=2),  # the first compiles and allocates
    }


def process_each(bench: Workbench, cluster: Cluster, results: dict[str, Any]) -> None:
    """Compare one thread for all devices with a process for each: steps with SGD, in turns."""
    step = replace(bench.extraction.step, optimizer=Optimizer.of("sgd"))
    with_sgd = Workbench(step, cluster)
    problem = with_sgd.problem()
    plans = [everything_on(problem, 0), *at_random(problem, [PROCESS_SHARE])]
    results["rows"] = [one_thread_or_processes(with_sgd, problem, plan) for plan in plans]


def one_thread_or_processes(bench: Workbench, problem: Problem, plan: Candidate) -> dict[str, Any]:
    """Time one placement driven by one thread and by a process for each device, never both at once.

    One would slow the other. Ties are judged by turns of the same visit.
    """
    placed = placement(problem, plan)
    calls = cast("CallGraph", bench.runtime.calls)  # not a map of modules
    seconds: dict[str, list[float]] = {"one thread": [], "processes": []}
    for _ in range(VISITS):
        for wall_s, kind in zip(seconds.values(), (TorchExecutor, WorkerExecutor), strict=True):
            with closing(kind(bench.extraction, calls, problem, limits={})) as executor:
                loaded = executor.load(placed)
                for _ in range(TURNS):
                    step = loaded if isinstance(loaded, Failure) else loaded.run()
                    if isinstance(step, Failure):
                        return {"name": plan.name, "failure": step.reason}
                    wall_s.append(step.wall_s)
    return {"name": plan.name, **as_compared(seconds)}


def _copied(bench: Workbench) -> Extraction:
    """Return the extraction with another copy of the model."""
    return replace(bench.extraction, step=copy.deepcopy(bench.extraction.step))
