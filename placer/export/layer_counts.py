"""Export as layers per stage: by number for vLLM, by name for torchtitan.

``vllm`` holds the environment variable of vLLM's pipeline parallelism, ``torchtitan`` the setting
of its parallelism section.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

from placer.export.faults import ExportError
from placer.export.format import Exported
from placer.export.layers import Stack, stacks
from placer.export.moved import told_moved
from placer.export.placed_modules import PlacedModules
from placer.export.stages import WHOLE, cost_of, moved, stages, ties_across
from placer.export.torchtitan import titan_parts


def layer_counts(placed: PlacedModules) -> Exported:
    """Return the number of layers of the model's only stack on each device, in stage order.

    Raises:
        ExportError: the model does not have exactly one stack of layers, the stack is on one
            device, or the placement returns to a device.
    """
    stack = _only_stack(placed)
    devices = [placed.home(layer) for layer in stack.layers]
    runs = [(device, len(list(run))) for device, run in groupby(devices)]
    if len(runs) == 1:
        others = {placed.home(unit) for unit in placed.units()} - {devices[0]}
        what = f"layers of {stack.path or 'the model'}" if others else "modules"
        raise ExportError(f"all {what} are on {devices[0]}: there is nothing to split")
    _check_once(stack, devices)
    counts = [count for _, count in runs]
    content: dict[str, Any] = {
        "layers": stack.path,
        "stages": [device for device, _ in runs],
        "counts": counts,
        "vllm": {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, counts))},
    }
    try:
        found = stages(placed)
    except ExportError as error:
        told = [f"counts are of layers alone: what is around them is placed otherwise ({error})"]
        runs_on = placed.by_module(dict(zip(stack.layers, devices, strict=True)))
        told += told_moved(placed, runs_on, stack.layers, WHOLE)
        if placed.price is not None:
            told.append("no step is predicted: where what is around the layers runs is not known")
        return Exported(is_as_placed=False, content=content, remarks=tuple(told))
    told = moved(placed, found)
    costs = cost_of(placed, found, moved=bool(told))
    remarks = [*told, *costs, *ties_across(placed, found)]
    if (parts := titan_parts(placed.model, stack, found)) is None:
        remarks.append("torchtitan has no names for what is around the layers: counts alone")
    else:
        content["torchtitan"] = {"module_fqns_per_model_part": parts}
    return Exported(is_as_placed=not told, content=content, remarks=tuple(remarks))


def _only_stack(placed: PlacedModules) -> Stack:
    found = stacks(placed.model)
    if len(found) == 1:
        return found[0]
    name = type(placed.model).__name__
    if not found:
        raise ExportError(f"{name} has no list of like layers that could be counted")
    raise ExportError(
        f"{name} has {len(found)} lists of layers, {', '.join(stack.path for stack in found)}, but "
        "counts are of one; --format pipeline names split points instead"
    )


def _check_once(stack: Stack, devices: list[str]) -> None:
    left: set[str] = set()
    for layer, (before, device) in zip(stack.layers[1:], pairwise(devices), strict=True):
        left |= {before} if before != device else set()
        if device in left:
            raise ExportError(
                f"the placement is no pipeline: layer {layer} goes back to {device}, which was "
                "left before"
            )
