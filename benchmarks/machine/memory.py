"""Memory of workers on two cores: predicted and measured, and the fit of its constants.

    python -m benchmarks memory

For each model: the placements of the heuristics and random ones, each run once by warm workers.
"before" is the simulator's memory, which counts tensors only. The last part fits the constants of
:mod:`envs.executors.cores.memory` to what all parts before it measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.record import Effort, Part
from benchmarks.steps.models import MODELS
from benchmarks.tables import Table, spread
from envs.core_runtime import CoreRuntime
from envs.executors.cores.arena import load_example
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.memory import HEAP_BASE_BYTES, HEAP_FACTOR, WorkerMemory
from envs.executors.cores.pool import WorkerPool
from envs.hardware.cluster import Link
from envs.hardware.discover import discover
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.costs import with_costs
from graphs.extract import Extraction, extract
from graphs.graph import GraphArrays
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics

TOLERANCE: Final = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory of one worker in one placement, in bytes."""

    simulated: int
    arena: int
    heap: int  # of the simulated heap
    predicted: int
    measured: int


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each model, and the fit."""
    count = effort.pick(quick=3, normal=20, full=20)
    names = list(MODELS)[: effort.pick(quick=2, normal=len(MODELS), full=len(MODELS))]
    samples: list[Sample] = []
    each: dict[str, Part] = {name: partial(measured, name, count, samples) for name in names}
    return each | {"constants": partial(fitted, samples)}


def measured(model: str, count: int, samples: list[Sample], found: dict[str, Any]) -> Table:
    """Measure the workers of one model."""
    extraction = extract(MODELS[model]())
    cores = sorted(os.sched_getaffinity(0))[:2]
    cluster = discover(",".join(f"core:{core}" for core in cores))
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    kinds = {device.kind for device in cluster.devices}
    equal_s = {kind: np.full(len(extraction.graph), 1e-5) for kind in kinds}
    graph = with_costs(extraction.graph, equal_s, dict.fromkeys(kinds, "equal"))
    arrays = GraphArrays.from_graph(graph)
    problem = Problem.of(arrays, replace(cluster, links=(link,)))
    own: list[Sample] = []
    with WorkerPool(extraction.program, problem.cluster.devices) as pool:
        load_example(pool.arena, extraction.step)
        for placement in _placements(problem, count):
            own += _samples(extraction, problem, pool, placement)
    samples += own
    found["samples"] = [[s.simulated, s.arena, s.heap, s.predicted, s.measured] for s in own]
    before = [sample.simulated / sample.measured for sample in own]
    after = [sample.predicted / sample.measured for sample in own]
    within = np.mean([abs(ratio - 1) <= TOLERANCE for ratio in after])
    return Table(
        "Memory of workers",
        "predicted over measured, median and range over workers",
        ("model", "workers", "largest", "before", "predicted / measured", "within 15 %"),
        (
            (
                model,
                f"{len(own)}",
                f"{max(sample.measured for sample in own) / 1e6:.0f} MB",
                spread(before, ".2f"),
                spread(after, ".2f"),
                f"{within:.0%}",
            ),
        ),
    )


def _placements(problem: Problem, count: int) -> list[Placement]:
    """Return those of the heuristics, and random ones with random shares of both devices."""
    arrays = [(each.devices, each.priority) for each in heuristics(Evaluator(problem))]
    groups = problem.graph.group
    for seed in range(count):
        rng = np.random.default_rng(seed)
        devices = (rng.random(problem.op_count) < rng.random()).astype(np.int32)
        for group in np.unique(groups[groups >= 0]):
            devices[groups == group] = devices[groups == group][0]
        arrays.append((devices, rng.random(problem.op_count)))
    return [Placement.of(problem.graph, problem.cluster, *each) for each in arrays]


def _samples(
    extraction: Extraction, problem: Problem, pool: WorkerPool, placement: Placement
) -> list[Sample]:
    """Run a placement twice; return the memory of the second run, by worker that had ops."""
    schedule = Simulator(problem).run(*placement.arrays())
    runtime = CoreRuntime(extraction, problem.cluster)
    order = runtime.order(problem, schedule)
    lists = device_lists(extraction.program, placement.devices, order, problem.device_count)
    number = pool.load(lists)
    pool.run(number)
    pool.count_memory()
    pool.run(number)
    peaks = pool.peak_memory_bytes()
    pool.unload(number)
    memory = WorkerMemory(extraction.program)
    return [
        Sample(
            simulated=int(schedule.peak_bytes[d]),
            arena=memory.arena_bytes(instructions),
            heap=memory.heap(instructions).peak_bytes,
            predicted=memory.peak_bytes(instructions),
            measured=peaks[name],
        )
        for d, (name, instructions) in enumerate(zip(problem.cluster.names, lists, strict=True))
        if instructions and name in peaks
    ]


def fitted(samples: Sequence[Sample], found: dict[str, Any]) -> Table | None:
    """Fit both constants: least squares of the relative error of all workers measured before."""
    if not samples:
        return None
    measured_bytes = np.array([sample.measured for sample in samples], np.float64)
    heap_bytes = np.array([sample.heap for sample in samples], np.float64)
    rest_bytes = measured_bytes - [sample.arena for sample in samples]
    columns = np.stack([heap_bytes, np.ones(len(samples))], axis=1) / measured_bytes[:, None]
    (factor, base_bytes), *_ = np.linalg.lstsq(columns, rest_bytes / measured_bytes)
    found.update(heap_factor=factor, heap_base_bytes=base_bytes)
    return Table(
        "Constants of workers' memory",
        f"fitted to {len(samples)} workers",
        ("constant", "in use", "fitted"),
        (
            ("HEAP_FACTOR", f"{HEAP_FACTOR:.2f}", f"{factor:.2f}"),
            ("HEAP_BASE_BYTES", f"{HEAP_BASE_BYTES:,}", f"{base_bytes:,.0f}"),
        ),
    )
