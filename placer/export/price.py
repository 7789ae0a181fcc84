"""What an export costs: the predicted step of what is exported, against that of the placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from torch import nn

from envs.backend import StepResult
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from placer.export.placed_modules import around, canonical_paths
from placer.milliseconds import milliseconds

Price: TypeAlias = Callable[[Mapping[str, str]], str]
"""What it costs to give modules one device each, {module: device}, as the end of a sentence."""


def price_of(
    problem: Problem, placement: Placement, model: nn.Module, renamed: Mapping[str, str]
) -> Price:
    """Tells the price of exports of a placement.

    Args:
        problem: what was placed.
        placement: of its ops.
        model: whose modules they are of.
        renamed: {device of the placement: device of the export}.

    Raises:
        ValueError: the placement is of another graph, or has other devices.
    """
    placed = placement.aligned(problem.graph, problem.cluster)

    def price(device_of: Mapping[str, str]) -> str:
        exported = coarsened(problem, placed, model, device_of, renamed)
        before, after = Simulated(problem).evaluate([placed, exported])
        return _told(before, after)

    return price


def coarsened(
    problem: Problem,
    placed: Placement,
    model: nn.Module,
    device_of: Mapping[str, str],
    renamed: Mapping[str, str],
) -> Placement:
    """The placement with all ops inside a module on its device, in the order of the program.

    Ops outside of these modules stay where they are, those that must share a device go with the
    first of them.
    """
    graph, names = problem.graph, problem.cluster.names
    index = {renamed.get(name, name): d for d, name in enumerate(names)}
    path_of = canonical_paths(model)
    devices = np.array(placed.devices)
    home: dict[int, int] = {}
    for i in graph.topological.tolist():
        unit = around(path_of.get(graph.modules[i], graph.modules[i]), device_of)
        own = int(devices[i]) if unit is None else index[device_of[unit]]
        group = int(graph.group[i])
        devices[i] = own if group < 0 else home.setdefault(group, own)
    rank = np.empty(len(graph))
    rank[graph.topological] = np.arange(len(graph), 0, -1)
    return replace(placed, devices=tuple(devices.tolist()), priority=tuple(rank.tolist()))


def _told(before: StepResult, after: StepResult) -> str:
    if not before.feasible:
        return f"no step is predicted, since as placed {before.why}"
    if not after.feasible:
        return f"a step is predicted to be impossible: {after.why}"
    more = after.step_s / before.step_s - 1
    change = f"{abs(more):.1%} {'longer' if more >= 0 else 'less'}"
    return (
        f"a step is predicted to take {milliseconds(after.step_s)} ms, {change} than the "
        f"{milliseconds(before.step_s)} ms as placed"
    )
