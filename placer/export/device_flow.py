"""A dry run of a device map on paper: on which device every value of the forward pass would be.

It follows what accelerate's hooks do: what goes into a module of the map is sent to its device,
all other ops run where their inputs are, and fail if these are on several devices.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.extract import Step
from graphs.extract.forward import ForwardCall, ForwardProgram
from placer.export.placed_modules import around, canonical_paths

FED = "<fed>"
"""Stands for the inputs of the model among the modules that made a value."""


SELF_RETURNING = frozenset({"to", "contiguous", "dropout", "alias"})


@dataclass(frozen=True, slots=True)
class Conflict:
    """An op of ``module`` that reads values of several devices, made by these modules.

    ``is_followed`` is whether it is known where all is that the module's own ops read; a mask that
    the model makes or sends itself is not followed.
    """

    module: str
    makers: tuple[str, ...]
    op: str
    is_followed: bool = True

    def told(self, model: nn.Module) -> str:
        """The op and the code it is in: ``cat in Layer.forward of layers.0``."""
        return self.code(model) + (f" of {self.module}" if self.module else "")

    def code(self, model: nn.Module) -> str:
        """The same for all modules of the class: ``cat in Layer.forward``."""
        return f"{self.op} in {type(model.get_submodule(self.module)).__name__}.forward"

    @property
    def origins(self) -> str:
        """Where what it reads comes from: ``left and right``."""
        return " and ".join(
            "the inputs of the model" if maker == FED else maker for maker in self.makers
        )


@dataclass(frozen=True, slots=True)
class _Value:
    device: str | None  # None: wherever it is read
    maker: str = FED


ANYWHERE = _Value(None)


def main_device_of(devices: Iterable[str]) -> str:
    """The main device that accelerate takes by itself: an accelerator, if there is one."""
    return min(devices, key=lambda name: (name == "cpu", len(name), name))


def first_conflict(
    program: ForwardProgram,
    step: Step,
    device_of: Mapping[str, str],
    main_device: str,
    gates: Container[str] = (),
) -> Conflict | None:
    """The first op that would find its inputs on several devices, None if all run.

    Args:
        program: the forward pass.
        step: the step it is of.
        device_of: {module: device}, no module inside another.
        main_device: where the inputs are.
        gates: modules that the map could name but need not; they count as makers of values.
    """
    first: Conflict | None = None
    unknown: set[str] = set()
    values: dict[int, _Value] = {}
    targets: set[int] = set()
    path_of = canonical_paths(step.model)
    with_target = step.training and step.loss is not None
    fed = len(tree_leaves(step.model_inputs)) if with_target else sys.maxsize
    for source in program.sources:
        if source.role == "input":
            values[source.value] = _Value(main_device)
            if int(source.name) >= fed:
                targets.add(source.value)
        elif (
            source.role in ("parameter", "buffer")
            and (owner := around(source.name, device_of)) is not None
        ):
            values[source.value] = _Value(device_of[owner], owner)
    for call in program.calls:
        if targets.intersection(call.reads):  # of the loss, which gets what the model returns
            targets.update(_made_by(call))
            continue
        if _returns_its_argument(program, call):
            same = values.get(call.reads[0], ANYWHERE)
            values |= dict.fromkeys(_made_by(call), same)
            continue
        module = path_of.get(call.module, call.module)
        made = _made(call, module, values, device_of)
        if around(module, device_of) is None and any(
            values.get(index, ANYWHERE).device is None for index in call.reads
        ):
            unknown.add(module)
        if isinstance(made, Conflict):
            first = first or made
            made = _Value(main_device)
        if module in gates and made.device is not None:
            made = replace(made, maker=module)
        values |= dict.fromkeys(_made_by(call), made)
    return first and replace(first, is_followed=first.module not in unknown)


def _made(
    call: ForwardCall, module: str, values: Mapping[int, _Value], device_of: Mapping[str, str]
) -> _Value | Conflict:
    """Where a call's results are, or why it fails."""
    owner = around(module, device_of)
    if owner is not None:
        return _Value(device_of[owner], owner)
    if _is_told_where(call):
        return ANYWHERE
    read = [value for index in call.reads if (value := values.get(index)) and value.device]
    if len({value.device for value in read}) > 1:
        makers = tuple(dict.fromkeys(value.maker for value in read))
        return Conflict(module, makers, call.op)
    return read[0] if read else ANYWHERE


def _made_by(call: ForwardCall) -> list[int]:
    return [value for value in call.outputs if value is not None]


def _returns_its_argument(program: ForwardProgram, call: ForwardCall) -> bool:
    """Whether a call hands its argument back, as to() does with nothing to convert.

    To the exporter both are one tensor: who reads the result may mean the argument.
    """
    made = _made_by(call)
    if call.op not in SELF_RETURNING or len(call.reads) != 1 or len(made) != 1:
        return False
    return program.storage_of[made[0]] == program.storage_of[call.reads[0]]


def _is_told_where(call: ForwardCall) -> bool:
    """Whether the model itself sends a value: to(device), most often that of another tensor."""
    return call.op == "to" and getattr(call.target, "_overloadname", "") in (
        "device",
        "dtype_layout",
        "prim_Device",
    )
