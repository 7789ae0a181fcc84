"""A dry run of a device map on paper: on which device every call of the forward pass would run.

It follows what accelerate's hooks do: what goes into a module that has one is sent to its device,
everything else runs where its inputs are, and fails if these are on several devices.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.extract import Step
from graphs.extract.forward import ForwardCall, ForwardProgram
from placer.export.hooks import Hooks
from placer.export.placed_modules import around, canonical_paths, parent

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
        names = {FED: "the inputs of the model", "": "the rest of the model"}
        return " and ".join(names.get(maker, maker) for maker in self.makers)


@dataclass(frozen=True, slots=True)
class Flow:
    """Where the calls of a forward pass run, and the first that fails, if one does.

    ``devices`` is {key of a call: device}, without calls that run wherever they are read. Those in
    ``of_loss`` are no part of the model: they run where the model returns its output. Those that
    are ``failing`` have inputs on several devices.
    """

    devices: Mapping[str, str]
    of_loss: frozenset[str]
    failing: frozenset[str]
    conflict: Conflict | None


@dataclass(frozen=True, slots=True)
class _Value:
    device: str | None  # None: wherever it is read
    maker: str = FED  # the module of the map that made it
    path: str = ""  # the module in whose code it was made


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
    """The first op that would find its inputs on several devices, None if all run; see flow()."""
    return flow(program, step, device_of, main_device, gates).conflict


def flow(
    program: ForwardProgram,
    step: Step,
    device_of: Mapping[str, str],
    main_device: str,
    gates: Container[str] = (),
    as_modules: Mapping[str, str] = MappingProxyType({}),
) -> Flow:
    """Run a device map on paper. After an op that fails it goes on, on the main device.

    Args:
        program: the forward pass.
        step: the step it is of.
        device_of: {module: device}; of modules inside others the innermost counts.
        main_device: where the inputs are.
        gates: modules that the map could name but need not; they count as makers of values.
        as_modules: {key of a call: device} of calls taken as modules of their own in the map.
    """
    first: Conflict | None = None
    devices: dict[str, str] = {}
    of_loss: set[str] = set()
    failing: set[str] = set()
    unknown: set[str] = set()
    hooks = Hooks.of(step.model, device_of, main_device)
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
            and (owner := around(source.name, hooks.runs_on)) is not None
        ):
            values[source.value] = _Value(hooks.runs_on[owner], owner, parent(source.name))
    for call in program.calls:
        if targets.intersection(call.reads):  # of the loss, which gets what the model returns
            targets.update(_made_by(call))
            devices[call.key] = main_device
            of_loss.add(call.key)
            continue
        if _returns_its_argument(program, call):
            same = values.get(call.reads[0], ANYWHERE)
            values |= dict.fromkeys(_made_by(call), same)
            continue
        module = path_of.get(call.module, call.module)
        made: _Value | Conflict
        if call.key in as_modules:
            made = _Value(as_modules[call.key], call.key, module)
        else:
            made = _made(call, module, values, hooks)
        if around(module, device_of) is None and any(
            values.get(index, ANYWHERE).device is None for index in call.reads
        ):
            unknown.add(module)
        if isinstance(made, Conflict):
            first = first or made
            failing.add(call.key)
            made = _Value(main_device, path=module)
        if module in gates and made.device is not None:
            made = replace(made, maker=module)
        if made.device is not None:
            devices[call.key] = made.device
        values |= dict.fromkeys(_made_by(call), made)
    conflict = first and replace(first, is_followed=first.module not in unknown)
    return Flow(devices, frozenset(of_loss), frozenset(failing), conflict)


def _made(
    call: ForwardCall, module: str, values: Mapping[int, _Value], hooks: Hooks
) -> _Value | Conflict:
    """Where a call's results are, or why it fails."""
    owner = around(module, hooks.runs_on)
    own = ANYWHERE if owner is None else _Value(hooks.runs_on[owner], owner, module)
    if _is_told_where(call):
        return own
    read = [
        replace(value, device=hooks.entering(module, value.path) or value.device)
        for index in call.reads
        if (value := values.get(index)) and value.device
    ]
    if len({value.device for value in read}) > 1:
        makers = tuple(dict.fromkeys(value.maker for value in read))
        return Conflict(module, makers, call.op)
    if not read:
        return own
    return replace(read[0] if read[0].device != own.device else own, path=module)


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
