"""Dry run of a device map: the device on which each call of the forward pass would run.

It follows accelerate's ``dispatch_model``: inputs of a hooked module are sent to its device;
everything else runs where its inputs are, and fails if these are on several devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.extract import Workload
from graphs.extract.errors import shown_lines
from graphs.extract.export.forward import ForwardCall, ForwardProgram
from placer.exports.module_tree import around, canonical_paths, is_inside, parent
from placer.exports.placed_modules import PlacedModules

HOST: Final = "cpu"
INPUTS: Final = "<inputs>"
"""Stands for the model's inputs among the modules that produce values."""
SELF_RETURNING: Final = frozenset({"to", "contiguous", "dropout", "alias"})


class Hooks:
    """Hooks of a dispatched model, see accelerate's ``attach_align_device_hook_on_blocks``.

    ``runs_on`` is {module of the map: device that it computes on}. ``sends_to`` is {hooked module:
    device of its inputs}: modules of the map, and inside them all modules with state, which are
    hooked by the outermost module of the map around them.
    """

    def __init__(self, model: nn.Module, device_of: Mapping[str, str], main_device: str) -> None:
        """Take a map, {module: device}, of a model that is fed on the main device.

        Modules that the map puts on the CPU are offloaded and compute on the main device; so does
        the model as a whole, if the map names it beside others.
        """
        self.runs_on = {
            path: main_device if device == HOST or not path else device
            for path, device in device_of.items()
        }
        self.sends_to = dict(self.runs_on)
        for path in _with_state(model) - self.runs_on.keys():
            if (outer := _outermost(path, self.runs_on)) is not None:
                self.sends_to[path] = self.runs_on[outer]
        self.sends_to[""] = main_device

    def entering(self, module: str, made_in: str) -> str | None:
        """Return the device to which a value moves when it enters a module, None if it stays."""
        while not is_inside(made_in, module):
            if module in self.sends_to:
                return self.sends_to[module]
            module = parent(module)
        return None


@dataclass(frozen=True, slots=True)
class Conflict:
    """An op of ``module`` that reads values on several devices, produced by ``producers``.

    ``is_followed`` says whether the dry run knows the device of everything that the module's own
    ops read; it does not follow a mask that the model creates or moves itself.
    """

    module: str
    producers: tuple[str, ...]
    op: str
    is_followed: bool = True


@dataclass(frozen=True, slots=True)
class Flow:
    """Devices of the calls of a forward pass, and the first conflict, if any.

    ``devices`` is {call key: device}, without calls that run wherever their results are read. Calls
    in ``of_loss`` are outside the model and run on the device of its output.
    """

    devices: Mapping[str, str]
    of_loss: frozenset[str]
    conflict: Conflict | None


@dataclass(frozen=True, slots=True)
class _Value:
    device: str | None  # None: any device
    producer: str = INPUTS  # the module of the map that produced it
    path: str = ""  # the module whose code produced it


ANYWHERE = _Value(None)


def main_device_of(devices: Iterable[str]) -> str:
    """Return accelerate's default main device: an accelerator, if there is one."""
    return min(devices, key=lambda name: (name == HOST, len(name), name))


def flow(
    program: ForwardProgram,
    step: Workload,
    device_of: Mapping[str, str],
    main_device: str,
    gates: Container[str] = (),
) -> Flow:
    """Dry-run a device map; after an op that fails, continue with its result on the main device.

    The map is ``device_of``, {module: device}; for nested modules the innermost counts. ``gates``
    are modules that it may but need not name; they count as producers of values.
    """
    first: Conflict | None = None
    devices: dict[str, str] = {}
    of_loss: set[str] = set()
    unknown: set[str] = set()
    hooks = Hooks(step.model, device_of, main_device)
    path_of = canonical_paths(step.model)
    values, targets = _sources(program, step, hooks, main_device)
    for call in program.calls:
        if targets.intersection(call.reads):  # part of the loss, which reads the model's output
            targets.update(_results(call))
            devices[call.key] = main_device
            of_loss.add(call.key)
            continue
        if _returns_its_argument(program, call):
            same = values.get(call.reads[0], ANYWHERE)
            values |= dict.fromkeys(_results(call), same)
            continue
        module = path_of.get(call.module, call.module)
        made = _output(call, module, values, hooks)
        if around(module, device_of) is None and any(
            values.get(index, ANYWHERE).device is None for index in call.reads
        ):
            unknown.add(module)
        if isinstance(made, Conflict):
            first = first or made
            made = _Value(main_device, path=module)
        if module in gates and made.device is not None:
            made = replace(made, producer=module)
        if made.device is not None:
            devices[call.key] = made.device
        values |= dict.fromkeys(_results(call), made)
    conflict = first and replace(first, is_followed=first.module not in unknown)
    return Flow(devices, frozenset(of_loss), conflict)


def run_of(
    placed: PlacedModules,
    device_of: Mapping[str, str],
    main_device: str,
    gates: Container[str] = (),
) -> Flow:
    """Dry-run a device map of a placed model; arguments are those of :func:`flow`.

    Ops that were not exported are where the forward pass of the model alone runs their modules. If
    it is unknown, too, modules run where the map has them, and no conflict is found.
    """
    program, step = placed.forward.program, placed.forward_step
    if program is not None:
        run = flow(program, step, device_of, main_device, gates)
        return run if placed.is_exported else by_module(run, placed, main_device)
    runs_on = Hooks(step.model, device_of, main_device).runs_on
    homes = {path: around(path, runs_on) for path, _ in step.model.named_modules()}
    devices = {f"{path}:": main_device if h is None else runs_on[h] for path, h in homes.items()}
    return by_module(Flow(devices, frozenset(), None), placed, main_device)


def by_module(run: Flow, placed: PlacedModules, main_device: str) -> Flow:
    """Return the dry run of the model alone for ops that are not its calls.

    An op is on the device of the call with its key, or else of most calls in the same call of its
    module, in its module, or in the modules around it. Ops outside of all modules are those of the
    loss, unless they have a call of their own or are :attr:`PlacedModules.root_ops`.
    """
    found: dict[str, Counter[str]] = {}
    for call, device in run.devices.items():
        called = call.rpartition(":")[0]
        for name in {called, called.partition("@")[0]}:
            found.setdefault(name, Counter())[device] += 1
    devices: dict[str, str] = {}
    of_loss: set[str] = set()
    root = placed.root_ops
    for op, module in ((each.call, each.module) for each in placed.ops):
        around_it = [op.rpartition(":")[0], module]
        while around_it[-1]:
            around_it.append(parent(around_it[-1]))
        known = next((found[n] for n in around_it if n in found and (n or op in root)), None)
        if op in run.devices:
            devices[op] = run.devices[op]
        elif known is not None:
            devices[op] = known.most_common(1)[0][0]
        else:
            devices[op] = main_device
            if op not in root:
                of_loss.add(op)
    return Flow(devices, frozenset(of_loss), run.conflict)


def unchecked(placed: PlacedModules) -> str:
    """Return what the dry run of a placed model cannot tell, "" if it holds for any data."""
    if placed.forward.program is None:
        return (
            "functions between modules were not checked, since the model can be neither exported "
            "nor recorded: each must read from modules on one device"
        )
    if not placed.forward.depends_on_data:
        return ""
    return (
        "functions between modules were checked for the example inputs only, since the model reads "
        f"values of tensors ({shown_lines(placed.forward.depends_on_data)})"
    )


def _sources(
    program: ForwardProgram, step: Workload, hooks: Hooks, main_device: str
) -> tuple[dict[int, _Value], set[int]]:
    """Return the inputs, parameters and buffers by index, and the indices of the loss's targets."""
    values: dict[int, _Value] = {}
    targets: set[int] = set()
    # In the order of leaves the target comes between arguments and keywords.
    own, given = len(tree_leaves(step.model_inputs)), len(tree_leaves(step.step_inputs))
    for source in program.sources:
        if source.role == "input":
            values[source.value] = _Value(main_device)
            if own <= int(source.name) < given:
                targets.add(source.value)
        elif (
            source.role in ("parameter", "buffer")
            and (owner := around(source.name, hooks.runs_on)) is not None
        ):
            values[source.value] = _Value(hooks.runs_on[owner], owner, parent(source.name))
    return values, targets


def _output(
    call: ForwardCall, module: str, values: Mapping[int, _Value], hooks: Hooks
) -> _Value | Conflict:
    owner = around(module, hooks.runs_on)
    unmoved = ANYWHERE if owner is None else _Value(hooks.runs_on[owner], owner, module)
    if _is_moved_by_model(call):
        return unmoved
    read = [
        replace(value, device=hooks.entering(module, value.path) or value.device)
        for index in call.reads
        if (value := values.get(index)) and value.device
    ]
    if len({value.device for value in read}) > 1:
        producers = tuple(dict.fromkeys(value.producer for value in read))
        return Conflict(module, producers, call.op)
    if not read:
        return unmoved
    return replace(read[0] if read[0].device != unmoved.device else unmoved, path=module)


def _results(call: ForwardCall) -> list[int]:
    return [value for value in call.outputs if value is not None]


def _returns_its_argument(program: ForwardProgram, call: ForwardCall) -> bool:
    """Return whether a call returns its argument, like to() with nothing to convert.

    torch.export sees one tensor, so a reader of the result may mean the argument.
    """
    made = _results(call)
    if call.op not in SELF_RETURNING or len(call.reads) != 1 or len(made) != 1:
        return False
    return program.storage_of[made[0]] == program.storage_of[call.reads[0]]


def _is_moved_by_model(call: ForwardCall) -> bool:
    """Return whether the model's own code moves a value, as in ``x.to(y.device)``."""
    return call.op == "to" and getattr(call.target, "_overloadname", "") in (
        "device",
        "dtype_layout",
        "prim_Device",
    )


def _with_state(model: nn.Module) -> set[str]:
    paths: set[str] = set()
    for name in model.state_dict():
        path = name
        while path and (path := parent(path)) not in paths:
            paths.add(path)
    return paths


def _outermost(path: str, modules: Mapping[str, str]) -> str | None:
    outer, inner = None, around(path, modules)
    while inner is not None:
        outer = inner
        inner = around(parent(inner), modules) if inner else None
    return outer
