"""Pipeline stages: the modules of a placement by device, if it never returns to a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from placer.export.faults import ExportError
from placer.export.held import held_together
from placer.export.layers import layer_of, stacks
from placer.export.moved import told_moved
from placer.export.placed_modules import PlacedModules, around

WHOLE: Final = "a module is in one stage as a whole"
"""Reason why ops are off their device in the placement."""
BETWEEN: Final = "what is between modules runs in the stage that is reached"


@dataclass(frozen=True, slots=True)
class Stage:
    """The modules that one device runs in order before the next stage; stages are disjoint."""

    device: str
    modules: tuple[str, ...]


def stages(placed: PlacedModules) -> list[Stage]:
    """Return the stages of a placement that never returns to a device.

    Layers of a stack stay whole, since pipelines are cut between layers and torch cannot always cut
    inside one. Elsewhere modules are as small as possible. A module that goes back only because it
    shares a parameter, such as an embedding's, stays in the stage that reaches it, with a copy.

    Raises:
        ExportError: a unit is on a device that was left before, or runs again after that.
    """
    found = stacks(placed.model)
    units = list(dict.fromkeys(layer_of(unit, found) or unit for unit in placed.units()))
    device_of = {unit: placed.home(unit) for unit in units}
    runs: list[Stage] = []
    for unit, device in device_of.items():
        before = next((run for run in runs if run.device == device), None)
        if before is None:
            runs.append(Stage(device, (unit,)))
        elif before is runs[-1] or _share_parameter(placed, unit, before.modules):
            runs[-1] = Stage(runs[-1].device, (*runs[-1].modules, unit))
        else:
            raise ExportError(
                f"the placement is no pipeline, which has one stage for each device: {device} runs "
                f"{before.modules[-1]}, then {runs[-1].device} runs {runs[-1].modules[0]}, and "
                f"then {unit} is on {device} again"
            )
    _check_forward(placed, {unit: i for i, run in enumerate(runs) for unit in run.modules})
    return runs


def _share_parameter(placed: PlacedModules, unit: str, modules: Sequence[str]) -> bool:
    """Return whether a unit shares a parameter with one of these modules."""
    return any(unit in group for group in placed.tied_units([unit, *modules]))


def _check_forward(placed: PlacedModules, stage_of: Mapping[str, int]) -> None:
    reached = 0
    last = ""
    for op in placed.ops:
        unit = around(op.module, stage_of)
        if unit is None:
            continue
        if stage_of[unit] < reached:
            raise ExportError(
                f"the placement is no pipeline: {unit} runs again in stage {stage_of[unit]} after "
                f"{last} in stage {reached}"
            )
        reached, last = stage_of[unit], unit


def ties_across(placed: PlacedModules, found: Sequence[Stage]) -> list[str]:
    """Return a sentence for every parameter that several stages hold a copy of."""
    stage_of = {unit: i for i, stage in enumerate(found) for unit in stage.modules}
    return [
        f"{' and '.join(group)} share a parameter but not a stage: each stage has a copy, and in "
        "training their gradients must be added up"
        for group in placed.tied_units(stage_of)
        if len({stage_of[unit] for unit in group}) > 1
    ]


def runs_on(placed: PlacedModules, found: Sequence[Stage]) -> dict[str, str]:
    """Return {call: device of its stage}; calls outside all modules run in the stage reached."""
    stage_of = {unit: i for i, stage in enumerate(found) for unit in stage.modules}
    reached, devices = 0, {}
    for op in placed.ops:
        unit = around(op.module, stage_of)
        reached = reached if unit is None else max(reached, stage_of[unit])
        devices[op.call] = found[reached].device
    return devices


def moved(placed: PlacedModules, found: Sequence[Stage]) -> list[str]:
    """Return sentences on the ops that stages move and on how to place instead."""
    units = [unit for stage in found for unit in stage.modules]
    devices = runs_on(placed, found)
    told = told_moved(placed, devices, units, WHOLE, outside=BETWEEN)
    return told + held_together(placed, devices, units, lambda held: runs_on(held, stages(held)))


def cost_of(placed: PlacedModules, found: Sequence[Stage], *, moved: bool) -> list[str]:
    """Return sentences on the predicted step, if it is known and differs from the placement's."""
    if placed.price is None:
        return []
    return placed.price.told(runs_on(placed, found), moved=moved, single_step=False)
