"""Export as ``torch.distributed.pipelining`` split: the modules before which stages begin.

::

    split_spec = {name: SplitPoint.BEGINNING for name in exported["split_points"]}
    pipe = pipeline(model, mb_args, mb_kwargs, split_spec=split_spec)
    stage = pipe.build_stage(rank, exported["stages"][rank])
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Final
from unicodedata import normalize

from torch import nn

from graphs.extract.export.trace import reserved_modules
from placer.exports.format import FormatOutput
from placer.exports.module_tree import (
    around,
    canonical_paths,
    has_forward,
    is_inside,
    layer_of,
    stacks,
)
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError

MISREAD: Final = re.compile(r'[@"\\\0\n\r\ud800-\udfff]')
"""Characters that torch.fx does not escape in strings, and @, before torch's numbers of calls."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The modules that one device runs in order before the next stage; stages are disjoint."""

    device: str
    modules: tuple[str, ...]


def pipeline(placed: PlacedModules) -> FormatOutput:
    """Return the device of each stage, and the first module of each stage but the first."""
    placed.check_torch_devices()
    _check_names(placed.model)
    split, starts = pipeline_stages(placed)
    return FormatOutput(
        content={
            "stages": [stage.device for stage in split],
            "split_points": dict.fromkeys(starts, "beginning"),
        },
        runs_on=stage_devices(placed, split),
        remedy=shared_gradients(placed, split),
    )


def _check_names(model: nn.Module) -> None:
    """Check that torch can cut a model with these names of modules, parameters and buffers."""
    if reserved := reserved_modules(model):
        last = reserved[0].rpartition(".")[2]
        raise ExportError(
            f"rename the submodule {reserved[0]!r}: torch.export, which pipelining cuts the model "
            f"with, keeps the name {last!r} for itself"
        )
    tensors = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    for path in (*canonical_paths(model), *tensors):
        if not _is_kept_by_torch(last := path.rpartition(".")[2]):
            raise ExportError(
                f"rename {path!r}: torch, which writes names into Python code and numbers calls as "
                f"in name@1, would misread {last!r}"
            )


def _is_kept_by_torch(name: str) -> bool:
    """Return whether torch.fx writes a name right: as an attribute if it can, else as a string."""
    if name.isidentifier():
        return not iskeyword(name) and normalize("NFKC", name) == name
    return not MISREAD.search(name)


def pipeline_stages(placed: PlacedModules) -> tuple[list[Stage], list[str]]:
    """Return the stages of a placement, and the first module of each stage but the first."""
    split = stages(placed)
    if len(split) == 1:
        raise ExportError(f"all modules are on {split[0].device}: there is nothing to split")
    starts = [_first_called(placed, stage.modules[0]) for stage in split[1:]]
    for start in starts:
        if any(op.is_repeated and is_inside(op.module, start) for op in placed.ops):
            raise ExportError(
                f"a stage would begin with {start}, which a step calls more than once: pipelining "
                "splits at every call"
            )
    return split, starts


def _first_called(placed: PlacedModules, unit: str) -> str:
    """Return a unit that can be called, else the first module in it that is: torch cuts at calls.

    Layers may be lists themselves, as in a ModuleList of ModuleLists.
    """
    if has_forward(placed.model.get_submodule(unit)):
        return unit
    inside = (op.module for op in placed.ops if op.module.startswith(f"{unit}."))
    if (first := next(inside, None)) is None:
        raise ExportError(f"a stage would begin with {unit}, of which a step calls nothing")
    name, _, _ = first.removeprefix(f"{unit}.").partition(".")
    return _first_called(placed, f"{unit}.{name}")


def stages(placed: PlacedModules) -> list[Stage]:
    """Return the stages of a placement that never returns to a device.

    Layers of a stack stay whole, since pipelines are cut between layers and torch cannot always cut
    inside one. Elsewhere modules are as small as possible. A module that goes back only because it
    shares a parameter, such as an embedding's, stays in the stage that reaches it, with a copy.
    What a step does not call goes with the last stage.
    """
    all_stacks = stacks(placed.model)
    units = list(dict.fromkeys(layer_of(unit, all_stacks) or unit for unit in placed.units()))
    device_of = {unit: placed.home(unit) for unit in units}
    runs: list[Stage] = []
    for unit, device in device_of.items():
        before = next((run for run in runs if run.device == device), None)
        if runs and placed.majority([unit]) is None:  # it is not called
            before = runs[-1]
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
    check_order(placed, _stage_of(runs))
    return runs


def stage_devices(placed: PlacedModules, split: Sequence[Stage]) -> dict[str, str]:
    """Return {call: device of its stage}; calls outside all modules run in the stage reached."""
    stage_of = _stage_of(split)
    reached, devices = 0, {}
    for op in placed.ops:
        unit = around(op.module, stage_of)
        reached = reached if unit is None else max(reached, stage_of[unit])
        devices[op.call] = split[reached].device
    return devices


def shared_gradients(placed: PlacedModules, split: Sequence[Stage]) -> str:
    """Return a sentence on the parameters that several stages hold a copy of, "" if none."""
    stage_of = _stage_of(split)
    groups = [
        " and ".join(group)
        for group in placed.tied_units(stage_of)
        if len({stage_of[unit] for unit in group}) > 1
    ]
    if not placed.step.training:
        return ""
    sums = [
        f"the copies of the parameter that {group} share, one in each stage" for group in groups
    ]
    sums += [f"the copies of {name}, one in each stage" for name in _read_in_several(placed, split)]
    return f"in training, add up the gradients of {'; of '.join(sums)}" if sums else ""


def _read_in_several(placed: PlacedModules, split: Sequence[Stage]) -> list[str]:
    """Return the parameters outside of all stages, of a divided module, that several read."""
    program, stage_of = placed.forward.program, _stage_of(split)
    if program is None:
        return []
    devices = stage_devices(placed, split)
    return [
        source.name
        for source in program.sources
        if source.role == "parameter" and around(source.name, stage_of) is None
        if len({devices.get(call.key) for call in program.calls if source.value in call.reads}) > 1
    ]


def _stage_of(split: Sequence[Stage]) -> dict[str, int]:
    return {unit: i for i, stage in enumerate(split) for unit in stage.modules}


def _share_parameter(placed: PlacedModules, unit: str, modules: Sequence[str]) -> bool:
    """Return whether a unit shares a parameter with one of these modules."""
    return any(unit in group for group in placed.tied_units([unit, *modules]))


def check_order(placed: PlacedModules, stage_of: Mapping[str, int]) -> None:
    """Check that modules of {module: stage} never run after those of a later stage."""
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
