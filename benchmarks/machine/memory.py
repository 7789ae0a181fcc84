"""Memory of workers on two cores: predicted and measured, and the fit of its constants.

    python -m benchmarks memory

For each model: the placements of the heuristics and random ones, each in new workers that have run
it once. "tensors" is the simulator's memory. The last part fits the constants of
:mod:`envs.executors.cores.memory` to what all parts before it measured, and predicts each model by
the constants that fit the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Effort, Part
from benchmarks.steps.models import MODELS
from benchmarks.tables import Table, spread
from envs.core_runtime import CoreRuntime
from envs.executors.cores.arena import load_example
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.memory import (
    CALL_BYTES,
    HEAP_FACTOR,
    INSTRUCTION_BYTES,
    WORKER_BYTES,
    WorkerMemory,
)
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
CONSTANTS: Final = {
    "HEAP_FACTOR": HEAP_FACTOR,
    "WORKER_BYTES": WORKER_BYTES,
    "CALL_BYTES": CALL_BYTES,
    "INSTRUCTION_BYTES": INSTRUCTION_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory of one worker in one placement, in bytes, and what it is predicted from."""

    model: str
    simulated: int
    arena: int
    heap: int  # of the simulated heap
    calls: int  # of the program
    instructions: int
    predicted: int
    measured: int

    @property
    def factors(self) -> tuple[int, int, int, int]:
        """What the constants are multiplied with."""
        return self.heap, 1, self.calls, self.instructions


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
    placements = _placements(problem, count)
    own = [each for one in placements for each in _samples(model, extraction, problem, one)]
    samples += own
    found["samples"] = [asdict(sample) for sample in own]
    tensors = [sample.simulated / sample.measured for sample in own]
    ratios = [sample.predicted / sample.measured for sample in own]
    return Table(
        "Memory of workers",
        "predicted over measured, median and range over workers",
        ("model", "workers", "largest", "tensors", "predicted / measured", "within 15 %"),
        (
            (
                model,
                f"{len(own)}",
                f"{max(sample.measured for sample in own) / 1e6:.0f} MB",
                spread(tensors, ".2f"),
                spread(ratios, ".2f"),
                _within(ratios),
            ),
        ),
    )


def _within(ratios: Sequence[float]) -> str:
    return f"{np.mean([abs(ratio - 1) <= TOLERANCE for ratio in ratios]):.0%}"


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
    model: str, extraction: Extraction, problem: Problem, placement: Placement
) -> list[Sample]:
    """Run a placement twice; return the memory of the second run, by worker that had ops."""
    schedule = Simulator(problem).run(*placement.arrays())
    runtime = CoreRuntime(extraction, problem.cluster)
    order = runtime.order(problem, schedule)
    lists = device_lists(extraction.program, placement.devices, order, problem.device_count)
    with WorkerPool(extraction.program, problem.cluster.devices) as pool:
        load_example(pool.arena, extraction.step)
        number = pool.load(lists)
        pool.run(number)
        pool.count_memory(number)
        pool.run(number)
        peaks = pool.peak_memory_bytes()
    memory = WorkerMemory(extraction.program)
    return [
        Sample(
            model=model,
            simulated=int(schedule.peak_bytes[d]),
            arena=memory.arena_bytes(instructions),
            heap=memory.heap(instructions).peak_bytes,
            calls=len(extraction.program.calls),
            instructions=len(instructions),
            predicted=memory.peak_bytes(instructions),
            measured=peaks[name],
        )
        for d, (name, instructions) in enumerate(zip(problem.cluster.names, lists, strict=True))
        if instructions and name in peaks
    ]


def fitted(samples: Sequence[Sample], found: dict[str, Any]) -> Table | None:
    """Fit the constants to all workers, and check them on models that they were not fitted to."""
    if not samples:
        return None
    constants = _least_squares(samples)
    found.update(constants=dict(zip(CONSTANTS, constants.tolist(), strict=True)))
    ratios = []
    for model in dict.fromkeys(sample.model for sample in samples):
        own = [sample for sample in samples if sample.model == model]
        others = [sample for sample in samples if sample.model != model]
        if others:
            of_others = _least_squares(others)
            ratios += [(s.arena + float(of_others @ s.factors)) / s.measured for s in own]
    rows = [
        (name, f"{used:,.6g}", f"{value:,.6g}")
        for (name, used), value in zip(CONSTANTS.items(), constants.tolist(), strict=True)
    ]
    if ratios:
        rows.append(("predicted / measured, fitted to the others", "", spread(ratios, ".2f")))
        rows.append(("within 15 %, fitted to the others", "", _within(ratios)))
    return Table(
        "Constants of workers' memory",
        f"fitted to {len(samples)} workers: least squares of relative errors",
        ("constant", "in use", "fitted"),
        tuple(rows),
    )


def _least_squares(samples: Sequence[Sample]) -> NDArray[np.float64]:
    measured_bytes = np.array([sample.measured for sample in samples], np.float64)
    rest_bytes = measured_bytes - [sample.arena for sample in samples]
    columns = np.array([sample.factors for sample in samples]) / measured_bytes[:, None]
    fit, *_ = np.linalg.lstsq(columns, rest_bytes / measured_bytes)
    return np.asarray(fit, np.float64)
