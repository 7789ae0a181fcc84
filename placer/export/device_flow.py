"""Dry run of a device map: the device on which each call of the forward pass would run.

It follows accelerate's hooks: inputs of a hooked module are sent to its device; everything else
runs where its inputs are, and fails if these are on several devices.
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
"""Stands for the model's inputs among the modules that produce values."""


SELF_RETURNING = frozenset({"to", "contiguous", "dropout", "alias"})


@dataclass(frozen=True, slots=True)
class Conflict:
    """An op of ``module`` that reads values on several devices, produced by the modules ``makers``.

    ``is_followed`` says whether the dry run knows the device of everything that the module's own
    ops read; it does not follow a mask that the model creates or moves itself.
    """

    module: str
    makers: tuple[str, ...]
    op: str
    is_followed: bool = True

    def told(self, model: nn.Module) -> str:
        """Return the op and its code, as in ``cat in Layer.forward of layers.0``."""
        return self.code(model) + (f" of {self.module}" if self.module else "")

    def code(self, model: nn.Module) -> str:
        """Return the op and the class of its module, as in ``cat in Layer.forward``."""
        return f"{self.op} in {type(model.get_submodule(self.module)).__name__}.forward"

    @property
    def origins(self) -> str:
        """Return the producers of what the op reads, as in ``left and right``."""
        names = {FED: "the inputs of the model", "": "the rest of the model"}
        return " and ".join(names.get(maker, maker) for maker in self.makers)


@dataclass(frozen=True, slots=True)
class Flow:
    """Devices of the calls of a forward pass, and the first conflict, if any.

    ``devices`` is {call key: device}, without calls that run wherever their results are read. Calls
    in ``of_loss`` are outside the model and run on the device of its output. Calls in ``failing``
    have inputs on several devices.
    """

    devices: Mapping[str, str]
    of_loss: frozenset[str]
    failing: frozenset[str]
    conflict: Conflict | None


@dataclass(frozen=True, slots=True)
class _Value:
    device: str | None  # None: any device
    maker: str = FED  # the module of the map that produced it
    path: str = ""  # the module whose code produced it


ANYWHERE = _Value(None)


def main_device_of(devices: Iterable[str]) -> str:
    """Return accelerate's default main device: an accelerator, if there is one."""
    return min(devices, key=lambda name: (name == "cpu", len(name), name))


def first_conflict(
    program: ForwardProgram,
    step: Step,
    device_of: Mapping[str, str],
    main_device: str,
    gates: Container[str] = (),
) -> Conflict | None:
    """Return the first op with inputs on several devices, None if all run; see :func:`flow`."""
    return flow(program, step, device_of, main_device, gates).conflict


def flow(
    program: ForwardProgram,
    step: Step,
    device_of: Mapping[str, str],
    main_device: str,
    gates: Container[str] = (),
    as_modules: Mapping[str, str] = MappingProxyType({}),
) -> Flow:
    """Dry-run a device map; after an op that fails, continue with its result on the main device.

    Args:
        program: the forward pass.
        step: the step of the forward pass.
        device_of: {module: device}; for nested modules the innermost counts.
        main_device: device of the inputs.
        gates: modules that the map may but need not name; they count as producers of values.
        as_modules: {call key: device} for calls treated as modules of their own in the map.
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
        if targets.intersection(call.reads):  # part of the loss, which reads the model's output
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
    """Return whether a call returns its argument, like to() with nothing to convert.

    torch.export sees one tensor, so a reader of the result may mean the argument.
    """
    made = _made_by(call)
    if call.op not in SELF_RETURNING or len(call.reads) != 1 or len(made) != 1:
        return False
    return program.storage_of[made[0]] == program.storage_of[call.reads[0]]


def _is_told_where(call: ForwardCall) -> bool:
    """Return whether the model's own code moves a value, as in ``x.to(y.device)``."""
    return call.op == "to" and getattr(call.target, "_overloadname", "") in (
        "device",
        "dtype_layout",
        "prim_Device",
    )
