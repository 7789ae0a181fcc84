"""Export as Hugging Face ``device_map``: {module: GPU number or device}, for accelerate.

A map that accelerate can run covers every entry of the state dict, keeps tied weights together and
never lets an op outside its modules read from two devices. Modules are therefore joined until a dry
run passes, see :class:`MapUnits`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Final

import networkx as nx
from torch import nn

from placer.exports.dry_run import HOST, INPUTS, Conflict, Flow, main_device_of, run_of, unchecked
from placer.exports.format import FormatOutput, is_faster
from placer.exports.module_tree import (
    around,
    canonical_paths,
    has_forward,
    is_inside,
    layer_of,
    parent,
    stacks,
    whole_modules,
)
from placer.exports.placed_modules import PlacedModules, PredictStep
from placer.exports.renaming import ExportError

MOST_TRIED: Final = 16
"""Number of other devices tried for joined modules: each takes a dry run and a prediction."""
ON_HOST: Final = (
    'load it with dispatch_model(model, device_map, main_device="cpu"): otherwise accelerate '
    "computes on an accelerator what the map gives to the CPU"
)
LOADED: Final = "load it with dispatch_model(model, device_map, main_device={!r})"
OFFLOADED: Final = (
    "in a device_map cpu means offloaded: accelerate sends these weights to the main device in "
    "every step; with the main device cpu it computes on the CPU"
)

ON_ONE: Final = (
    "most work of every module was placed on one device, and a device_map places whole modules; "
    "placer.apply keeps the placement's gain"
)
ALL_ON_ONE: Final = "the placement is on one device; placer.device_map plans a map for several"


def device_map(placed: PlacedModules) -> FormatOutput:
    """Return a device map that runs and is as close to the placement as possible."""
    placed.check_torch_devices()
    placed_on = {op.device for op in placed.ops}
    main_device = placed.main_device or main_device_of(placed_on)
    units = MapUnits(placed, main_device)
    units.join_conflicts()
    may_offload = main_device != HOST and HOST in placed_on
    if placed.predict_step is not None and not may_offload:
        units.choose_devices(placed.predict_step)
    devices = _merged(placed.model, units.devices())
    run = units.run(units.devices())
    used = set(devices.values())
    offloads = HOST in used and len(used) > 1 and main_device != HOST
    if offloads and placed.step.training:
        raise ExportError(
            "in a device_map cpu means offloaded: accelerate would compute these modules on "
            f"{main_device} and give their parameters no gradients. Export for the main device "
            'cpu and use dispatch_model(..., main_device="cpu"), or place without cpu'
        )
    if len(used) == 1:
        remedies = [ALL_ON_ONE if len(placed_on) == 1 else units.reason or ON_ONE]
    else:
        remedies = [unchecked(placed), _loading(used, main_device), OFFLOADED if offloads else ""]
    known = canonical_paths(placed.model).keys() | placed.model.state_dict().keys()
    return FormatOutput(
        content={name: as_written(device) for name, device in devices.items() if name in known},
        runs_on=run.devices,
        not_placed=run.of_loss,
        is_predictable=not offloads,
        remedy="; ".join(filter(None, remedies)),
    )


def _loading(used: Collection[str], main_device: str) -> str:
    """Return how to load a map of several devices, "" if accelerate's defaults do."""
    if main_device == HOST and HOST in used:
        return ON_HOST
    if main_device != main_device_of(used):
        return LOADED.format(as_written(main_device))
    return ""


def as_written(device: str) -> int | str:
    """Return a device as device maps write it: 1 for ``cuda:1``, others by name."""
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdigit() else device


class MapUnits:
    """The units of a device map: modules with one device each, some of them joined.

    If an op of the model's own code, such as ``cat``, reads from two devices, the modules that
    produce its inputs are joined, i.e. share a device. accelerate moves the inputs of modules, so a
    module without parameters on the way (a gate, see :meth:`PlacedModules.gates`) suffices: it gets
    its own device. accelerate sends the parameters and buffers of the model itself to the main
    device, so they are joined with the inputs. Values from outside a layer of a stack, as on
    residual paths, would join all layers; in that case the layer, or the module in it around the
    op, becomes one unit.
    """

    def __init__(self, placed: PlacedModules, main_device: str) -> None:
        self.placed = placed
        self.main_device = main_device
        self.units = placed.map_units()
        self._first: Conflict | None = None
        self._stacks = stacks(placed.model)
        self._gates = placed.gates()
        self._links: list[tuple[str, ...]] = []
        self._whole = set(whole_modules(placed.model)).intersection(self.units)
        self._chosen: dict[str, str] = {}

    def join_conflicts(self) -> None:
        """Join the sources of conflicts until the dry run passes."""
        while (conflict := self._conflict()) is not None:
            self._first = self._first or conflict
            self._resolve(conflict)

    @property
    def reason(self) -> str:
        """Return the first reason why modules were joined, "" if there was none."""
        if self._first is None:
            return ""
        path, names = self._first.module, {INPUTS: "the inputs of the model", "": "the model"}
        code = f"{type(self.placed.model.get_submodule(path)).__name__}.forward"
        code += path and f" of {path}"
        producers = " and ".join(names.get(each, each) for each in self._first.producers)
        return (
            f"one device has it all, since {self._first.op} in {code} reads what {producers} "
            "give, and accelerate moves only inputs of modules: compute it in a module of its own"
        )

    def choose_devices(self, predict_step: PredictStep) -> None:
        """Move joined modules to another device if the predicted step is faster.

        Groups are tried one after the other, those with most work first; the map must still run.
        Nothing is moved if every forward op runs where it is placed.
        """
        runs_on = self.run(self.devices()).devices
        if all(runs_on.get(op.call, op.device) == op.device for op in self.placed.ops):
            return
        best = predict_step(runs_on)
        homes = sorted({op.device for op in self.placed.ops})
        others = (
            (group, home)
            for group in self._joined()
            for home in homes
            if home != self.devices()[group[0]]
        )
        for group, device in islice(others, MOST_TRIED):
            before = self._chosen
            self._chosen = before | dict.fromkeys(group, device)
            run = self.run(self.devices())
            step = predict_step(run.devices)
            if run.conflict is None and is_faster(step, best):
                best = step
            else:
                self._chosen = before

    def devices(self) -> dict[str, str]:
        """Return {unit: device}: the chosen device, else the one with most of the joined work.

        Units joined with the model's inputs are on the main device.
        """
        devices: dict[str, str] = {}
        for members in self._groups():
            units = [unit for unit in members if unit != INPUTS]
            device = self.placed.majority(units) or self.placed.home(members[0])
            devices |= dict.fromkeys(units, self.main_device if INPUTS in members else device)
        return {unit: devices[unit] for unit in self.units} | self._chosen

    def run(self, devices: Mapping[str, str]) -> Flow:
        """Return the dry run of the map for {unit: device}; a model on one device is fed there."""
        merged = _merged(self.placed.model, devices)
        used = set(merged.values())
        fed = self.main_device if len(used) > 1 else next(iter(used))
        return run_of(self.placed, merged, fed)

    def _joined(self) -> list[list[str]]:
        groups = [
            members
            for members in self._groups()
            if INPUTS not in members and (len(members) > 1 or members[0] in self._whole)
        ]
        flops = dict.fromkeys(self.units, 0)
        for op in self.placed.ops:
            if (unit := around(op.module, flops)) is not None:
                flops[unit] += op.flops
        return sorted(groups, key=lambda members: -sum(flops[unit] for unit in members))

    def _groups(self) -> list[list[str]]:
        """Return the units that share a device, in order; INPUTS marks the group of the inputs."""
        joined: nx.Graph[str] = nx.Graph()
        joined.add_nodes_from(self.units)
        own = [name for name in self.placed.own_tensors() if name in self.units]
        fed = [(INPUTS, *own)] if own else []
        for group in (*fed, *self._links, *self.placed.tied_units(self.units)):
            nx.add_path(joined, group)
        return [
            [unit for unit in (*self.units, INPUTS) if unit in component]
            for component in nx.connected_components(joined)
        ]

    def _conflict(self) -> Conflict | None:
        """Return the first conflict of the dry run; accelerate hooks nothing on a single device."""
        devices = self.devices()
        if len(set(devices.values())) == 1:
            return None
        return run_of(self.placed, devices, self.main_device, self._gates).conflict

    def _resolve(self, conflict: Conflict) -> None:
        if conflict.module in self._gates:
            self._name([conflict.module])
            return
        is_local = conflict.is_followed and all(
            producer != INPUTS and is_inside(producer, conflict.module)
            for producer in conflict.producers
        )
        if layer_of(conflict.module, self._stacks) is not None and not is_local:
            self._unite(conflict.module)
            return
        before = self.devices()
        self._name([producer for producer in conflict.producers if producer in self._gates])
        self._links.append(conflict.producers)
        if self.devices() == before:
            self._unite(conflict.module)

    def _name(self, gates: Collection[str]) -> None:
        new = [gate for gate in gates if gate not in self.units]
        self.units = self.placed.in_order([*self.units, *new])

    def _unite(self, module: str) -> None:
        """Make a module and everything inside it one unit."""
        rest = [unit for unit in self.units if not is_inside(unit, module)]
        self.units = self.placed.in_order([*rest, module])
        self._whole.add(module)

        def now(name: str) -> str:
            return module if name != INPUTS and is_inside(name, module) else name

        self._links = [tuple(dict.fromkeys(map(now, link))) for link in self._links]


def _merged(model: nn.Module, devices: Mapping[str, str]) -> dict[str, str]:
    """Return an equivalent map with fewer entries: a called module replaces its submodules.

    A ModuleList is never called, so no inputs would be sent to its device.
    """
    merged = _under_all_names(model, devices)
    paths = sorted(canonical_paths(model), key=lambda path: -path.count(".") - bool(path))
    for path in paths:
        inside = [unit for unit in merged if is_inside(unit, path)]
        called = has_forward(model.get_submodule(path))
        if called and inside and len({merged[unit] for unit in inside}) == 1:
            device = merged[inside[0]]
            merged = {
                path if unit == inside[0] else unit: device if unit == inside[0] else other
                for unit, other in merged.items()
                if unit == inside[0] or unit not in inside
            }
    return merged


def _under_all_names(model: nn.Module, devices: Mapping[str, str]) -> dict[str, str]:
    """Return a map that also has the further names of shared modules, as accelerate needs them."""
    named = dict(devices)
    path_of = canonical_paths(model)
    for name in model.state_dict():
        path = parent(name)
        home = around(path_of.get(path, path), devices)
        if home is not None and around(name, named) is None:
            named[path] = devices[home]
    return named
