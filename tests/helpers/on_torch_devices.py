"""Placements on two torch devices, and a backend that runs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envs.measured import Measured
from envs.placement import Placement
from envs.problem import Problem
from envs.torch_runtime import TorchExecutor
from graphs.extract import Workload, extract
from graphs.extract.placeable import placeable
from tests.helpers.clusters import equal_costs


def everywhere(problem: Problem, device: int, *, unplaced: bool = False) -> Placement:
    """Return the placement of all ops on one device, or of the unplaced model there."""
    order = -np.arange(problem.op_count, dtype=float)
    devices = np.full(problem.op_count, device)
    placed = Placement.of(problem.graph, problem.cluster, devices, order)
    return replace(placed, unplaced=unplaced)


def alternating(problem: Problem) -> Placement:
    """Return the placement of groups on both devices in turn, and of all else on the first."""
    group = problem.graph.group
    order = -np.arange(problem.op_count, dtype=float)
    devices = np.where(group >= 0, group % 2, 0)
    return Placement.of(problem.graph, problem.cluster, devices, order)


def opened(
    step: Workload, extractor: str = "auto", *, rounds: int = 1, warm_up: int = 0
) -> Measured:
    """Return a backend that runs placements of a step, whose ops cost the same, on both devices."""
    extraction = extract(step, extractor)
    calls = placeable(extraction)
    executor = TorchExecutor(extraction, calls, equal_costs(calls.graph))
    return Measured(executor, rounds=rounds, warm_up=warm_up)
