"""Hugging Face's ``device_map``: {module: GPU number or device}, as accelerate dispatches it.

A map that accelerate can run covers every entry of the state dict, keeps tied weights together and
never lets an op outside of its modules read from two devices. Modules are therefore joined until a
dry run passes (:mod:`placer.export.device_flow`): inside a layer of a stack to the module around
the op, elsewhere by giving one device to those whose outputs meet.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch import nn

from placer.export.device_flow import FED, Conflict, first_conflict
from placer.export.format import Exported
from placer.export.layers import Stack, layer_of, stacks
from placer.export.placed_modules import ExportError, PlacedModules, is_inside

HOST = "cpu"


def device_map(placed: PlacedModules) -> Exported:
    """A device map that runs, as near to the placement as one device for each module can be.

    Raises:
        ExportError: devices are not torch's, or accelerate would offload what is to be trained.
        ExtractionError: the model was not exported, so that no dry run can be made.
    """
    if why := placed.why_no_torch():
        raise ExportError(why)
    main_device = placed.main_device or _first_fed({op.device for op in placed.ops})
    found = _Joined(placed, main_device)
    while (conflict := found.conflict()) is not None:
        found.resolve(conflict)
    devices = found.devices()
    whole = _merged(placed.model, devices)
    remarks = [remark for remark in (placed.moved(whole),) if remark]
    used = set(devices.values())
    if HOST in used and len(used) > 1:
        remarks.append(_host_remark(placed, main_device))
    placed_on = {op.device for op in placed.ops}
    if len(used) == 1 and len(placed_on) > 1:
        remarks.append(f"one of {len(placed_on)} devices is left")
    return Exported(
        content={module: as_written(device) for module, device in whole.items()},
        remarks=tuple(remarks),
    )


def as_written(device: str) -> int | str:
    """A device as device maps have it: 1 for ``cuda:1``, anything else by name."""
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdigit() else device


def _first_fed(devices: Iterable[str]) -> str:
    """The main device that accelerate takes by itself: an accelerator, if there is one."""
    return min(devices, key=lambda name: (name == HOST, len(name), name))


def _host_remark(placed: PlacedModules, main_device: str) -> str:
    """What a reader of a map with the CPU and accelerators must know.

    Raises:
        ExportError: parameters that are to be trained would get no gradients.
    """
    if main_device == HOST:
        return (
            'load it with dispatch_model(model, device_map, main_device="cpu"): otherwise '
            "accelerate computes on an accelerator what the map gives to the CPU"
        )
    if placed.step.training:
        raise ExportError(
            "in a device_map cpu means offloaded: accelerate would compute these modules on "
            f"{main_device} and give their parameters no gradients. Export for a model that is fed "
            'on the CPU (--main-device cpu, and dispatch_model(..., main_device="cpu")), or place '
            "without cpu"
        )
    return (
        "in a device_map cpu means offloaded: accelerate keeps these weights on the host and "
        f"computes on {main_device}, which is not what was placed (with --main-device cpu it "
        "computes there)"
    )


class _Joined:
    """Units of a model that are joined step by step; joined ones share a device."""

    def __init__(self, placed: PlacedModules, main_device: str) -> None:
        self.placed = placed
        self.main_device = main_device
        self.units = placed.units()
        self._stacks: list[Stack] = stacks(placed.model)
        self._links: set[tuple[str, str]] = set()

    def devices(self) -> dict[str, str]:
        """{unit: device}; that of most work in all that are joined, or where the model is fed."""
        joined: nx.Graph[str] = nx.Graph()
        joined.add_nodes_from(self.units)
        for group in self.placed.tied_units(self.units):
            nx.add_path(joined, group)
        joined.add_edges_from(self._links)
        found: dict[str, str] = {}
        for component in nx.connected_components(joined):
            members = [unit for unit in self.units if unit in component]
            device = self.placed.majority(members) or self.placed.home(members[0])
            found |= dict.fromkeys(members, self.main_device if FED in component else device)
        return {unit: found[unit] for unit in self.units}

    def conflict(self) -> Conflict | None:
        """What the dry run of the map stumbles over."""
        program = self.placed.extraction.forward
        return first_conflict(program, self.placed.step, self.devices(), self.main_device)

    def resolve(self, conflict: Conflict) -> None:
        """Join what met on several devices."""
        if layer_of(conflict.module, self._stacks) is not None:
            self._whole(conflict.module)
            return
        before = self.devices()
        self._links |= {(conflict.makers[0], maker) for maker in conflict.makers[1:]}
        if self.devices() == before:
            self._whole(conflict.module)

    def _whole(self, module: str) -> None:
        """One unit for a module and all that is in it."""
        inside = [unit for unit in self.units if is_inside(unit, module)]

        def now(name: str) -> str:
            return module if is_inside(name, module) and name != FED else name

        place = self.units.index(inside[0]) if inside else 0
        rest = [unit for unit in self.units if unit not in inside]
        self.units = [*rest[:place], module, *rest[place:]]
        self._links = {(now(a), now(b)) for a, b in self._links if now(a) != now(b)}


def _merged(model: nn.Module, devices: dict[str, str]) -> dict[str, str]:
    """The same map with fewer entries: a module for all that is in it, if it is ever called.

    A ModuleList is not: nothing would be sent to its device.
    """
    merged = dict(devices)
    paths = sorted(dict(model.named_modules()), key=lambda path: -path.count(".") - bool(path))
    for path in paths:
        inside = [unit for unit in merged if is_inside(unit, path)]
        called = type(model.get_submodule(path)).forward is not nn.Module.forward
        if called and inside and len({merged[unit] for unit in inside}) == 1:
            device = merged[inside[0]]
            merged = {
                path if unit == inside[0] else unit: device if unit == inside[0] else own
                for unit, own in merged.items()
                if unit == inside[0] or unit not in inside
            }
    return merged
