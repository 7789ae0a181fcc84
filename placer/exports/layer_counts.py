"""Export as layers per stage: by number for vLLM, by name for torchtitan.

``vllm`` holds the environment variable of vLLM's pipeline parallelism, ``torchtitan`` the setting
of its parallelism section. torchtitan keeps children of its model by name, and single layers of
lists. It exposes a Hugging Face model as ``tok_embeddings``, ``layers``, ``norm``, ``lm_head`` and
``rotary_emb``, wherever they are; every stage computes the last one itself (torchtitan 0.3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from torch import nn

from placer.exports.format import FormatOutput
from placer.exports.module_tree import Stack, canonical_paths, stacks
from placer.exports.pipelining import (
    Stage,
    check_order,
    shared_gradients,
    stage_devices,
    stages,
)
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError

TITAN_NAMES: Final = {"embed_tokens": "tok_embeddings"}
EVERYWHERE: Final = "rotary_emb"
TITAN_PARTS: Final = re.compile(rf"tok_embeddings|layers\.\d+|norm|lm_head|{EVERYWHERE}")


def layer_counts(placed: PlacedModules) -> FormatOutput:
    """Return the number of layers of the model's only stack on each device, in stage order."""
    stack = _only_stack(placed)
    devices = [placed.home(layer) for layer in stack.layers]
    runs = [(device, len(list(run))) for device, run in groupby(devices)]
    if len(runs) == 1:
        others = {placed.home(unit) for unit in placed.units()} - {devices[0]}
        what = f"layers of {stack.path or 'the model'}" if others else "modules"
        raise ExportError(f"all {what} are on {devices[0]}: there is nothing to split")
    order = [device for device, _ in runs]
    if again := next((device for k, device in enumerate(order) if device in order[:k]), None):
        raise ExportError(
            f"the placement is no pipeline: layers go back to {again}, which was left before"
        )
    homes = dict(zip(stack.layers, devices, strict=True))
    check_order(placed, {layer: order.index(device) for layer, device in homes.items()})
    counts = [count for _, count in runs]
    content: dict[str, Any] = {
        "layers": stack.path,
        "stages": order,
        "counts": counts,
        "vllm": {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, counts))},
    }
    try:
        split = stages(placed)
    except ExportError:  # of what is around the layers, which counts leave to the runtime
        runs_on = placed.by_module(homes)
        return FormatOutput(content=content, runs_on=runs_on, is_predictable=False)
    if (parts := titan_parts(placed.model, stack, split)) is not None:
        content["torchtitan"] = {"module_fqns_per_model_part": parts}
    return FormatOutput(
        content=content,
        runs_on=stage_devices(placed, split),
        remedy=shared_gradients(placed, split),
    )


def titan_parts(model: nn.Module, stack: Stack, split: Sequence[Stage]) -> list[list[str]] | None:
    """Return ``module_fqns_per_model_part``, names by stage; None if torchtitan has none."""
    inside = stack.path.rpartition(".")[0]
    if not inside:
        parts = [list(stage.modules) for stage in split]
        is_list = isinstance(model.get_submodule(stack.path), nn.ModuleList)
        layers = set(stack.layers) if is_list else set()
        known = all("." not in name or name in layers for part in parts for name in part)
        return parts if known else None
    names = [[module.removeprefix(f"{inside}.") for module in stage.modules] for stage in split]
    parts = [[TITAN_NAMES.get(name, name) for name in part] for part in names]
    if not all(TITAN_PARTS.fullmatch(name) for part in parts for name in part):
        return None
    if not any(EVERYWHERE in part for part in parts):
        return parts
    return [[*(name for name in part if name != EVERYWHERE), EVERYWHERE] for part in parts]


def _only_stack(placed: PlacedModules) -> Stack:
    lists = stacks(placed.model)
    if len(lists) == 1:
        _check_distinct(placed.model, lists[0])
        return lists[0]
    name = type(placed.model).__name__
    if not lists:
        raise ExportError(f"{name} has no list of like layers that could be counted")
    raise ExportError(
        f"{name} has {len(lists)} lists of layers, {', '.join(stack.path for stack in lists)}, but "
        "counts are of one; the format pipeline names split points instead"
    )


def _check_distinct(model: nn.Module, stack: Stack) -> None:
    """Check that the layers of a stack are modules of their own, as a runtime builds them."""
    path_of = canonical_paths(model)
    prefix = f"{stack.path}." if stack.path else ""
    for layer in (f"{prefix}{name}" for name in model.get_submodule(stack.path)._modules):
        if (first := path_of[layer]) != layer:
            raise ExportError(
                f"{layer} is the module {first} again, but counts are of layers with weights of "
                "their own"
            )
