"""Joins modules of a device map until its dry run passes; joined modules share a device.

If an op of the model's own code, such as ``cat``, reads from two devices, the modules that produce
its inputs are joined. accelerate moves the inputs of modules, so a module without parameters on the
way (a gate, see :meth:`placer.export.placed_modules.PlacedModules.gates`) suffices: it gets its own
device. Values from outside a layer of a stack, as on residual paths, would join all layers; in that
case the layer, or the module in it around the op, becomes one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

import networkx as nx

from placer.export.device_flow import FED, Conflict, Flow, flow
from placer.export.layers import layer_of, stacks
from placer.export.placed_modules import PlacedModules, around, is_inside
from placer.export.price import Price, is_faster

MOST_TRIED: Final = 16
"""Number of other devices tried for joined modules: each takes a dry run and a prediction."""


class Joined:
    """Units of a model, joined step by step, with the reasons."""

    def __init__(self, placed: PlacedModules, main_device: str) -> None:
        self.placed = placed
        self.main_device = main_device
        self.units = placed.units()
        self._stacks = stacks(placed.model)
        self._gates = placed.gates()
        self._links: list[tuple[tuple[str, ...], Conflict]] = []
        self._whole: dict[str, Conflict] = {}
        self._chosen: dict[str, str] = {}

    def until_it_runs(self) -> None:
        """Join the sources of conflicts until the dry run passes."""
        while (conflict := self._conflict()) is not None:
            self._resolve(conflict)

    def choose(self, price: Price, run: Callable[[Mapping[str, str]], Flow]) -> None:
        """Move joined modules to another device if the predicted step is faster.

        Groups are tried one after the other, those with most work first; the map must still run.

        Args:
            price: predicts the step.
            run: dry-runs a map, {unit: device}.
        """
        best = price.step(run(self.devices()).devices)
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
            seen = run(self.devices())
            step = price.step(seen.devices)
            if seen.conflict is None and is_faster(step, best):
                best = step
            else:
                self._chosen = before

    def devices(self) -> dict[str, str]:
        """Return {unit: device}: the chosen device, else the one with most of the joined work.

        Units joined with the model's inputs are on the main device.
        """
        return self._devices_of(self._together()) | self._chosen

    def apart(self) -> dict[str, str]:
        """Return {unit: device} if only shared parameters joined units."""
        return self._devices_of(self.placed.tied_units(self.units))

    def runs_apart(self) -> dict[str, str]:
        """Return {call: device} for these units, with each failing call as a module of its own.

        Such a module has the call's device in the placement.
        """
        home = {op.call: op.device for op in self.placed.ops}
        as_modules: dict[str, str] = {}
        while True:
            seen = self._flow(self.apart(), as_modules)
            new = seen.failing - as_modules.keys()
            if not new:
                return dict(seen.devices)
            as_modules |= {call: home.get(call, self.main_device) for call in new}

    def calls(self) -> list[str]:
        """Return the ops outside modules that joined units, as in ``cat in Model.forward``."""
        apart = (conflict for makers, conflict in self._links if len(makers) > 1)
        return list(dict.fromkeys(map(self._told, apart)))

    def reasons(self) -> dict[str, str]:
        """Return {unit: reason why it may be off the device of most of its ops}."""
        found: dict[str, str] = {}
        ties = self.placed.tied_units(self.units)
        for unit, device in self.devices().items():
            if unit in self._whole:
                code = self._whole[unit].code(self.placed.model)
                found[unit] = f"{code} wants its inputs on one device, and joins all that is in it"
            elif self.placed.majority([unit]) == device:
                found[unit] = "its ops are placed on several devices, and a module has one"
            elif link := next((link for link in self._links if unit in link[0]), None):
                found[unit] = self._met(link[1])
            elif tie := next((tie for tie in ties if unit in tie), ()):
                found[unit] = f"{' and '.join(tie)} share a parameter"
        return found

    def _together(self) -> list[tuple[str, ...]]:
        links = [makers for makers, _ in self._links]
        return [*links, *self.placed.tied_units(self.units)]

    def _joined(self) -> list[list[str]]:
        groups = [
            members
            for members in self._groups(self._together())
            if FED not in members and (len(members) > 1 or members[0] in self._whole)
        ]
        flops = dict.fromkeys(self.units, 0)
        for op in self.placed.ops:
            if (unit := around(op.module, flops)) is not None:
                flops[unit] += op.flops
        return sorted(groups, key=lambda members: -sum(flops[unit] for unit in members))

    def _groups(self, together: Collection[tuple[str, ...]]) -> list[list[str]]:
        """Return the units that share a device, in order; FED marks the group of the inputs."""
        joined: nx.Graph[str] = nx.Graph()
        joined.add_nodes_from(self.units)
        for group in together:
            nx.add_path(joined, group)
        return [
            [unit for unit in (*self.units, FED) if unit in component]
            for component in nx.connected_components(joined)
        ]

    def _devices_of(self, together: Collection[tuple[str, ...]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for members in self._groups(together):
            units = [unit for unit in members if unit != FED]
            device = self.placed.majority(units) or self.placed.home(members[0])
            found |= dict.fromkeys(units, self.main_device if FED in members else device)
        return {unit: found[unit] for unit in self.units}

    def _conflict(self) -> Conflict | None:
        """Return the first conflict of the dry run; accelerate hooks nothing on a single device."""
        devices = self.devices()
        return self._flow(devices).conflict if len(set(devices.values())) > 1 else None

    def _flow(
        self, devices: Mapping[str, str], as_modules: Mapping[str, str] = MappingProxyType({})
    ) -> Flow:
        program, step = self.placed.extraction.forward, self.placed.step
        return flow(program, step, devices, self.main_device, self._gates, as_modules)

    def _resolve(self, conflict: Conflict) -> None:
        if conflict.module in self._gates:
            self._name([conflict.module])
            return
        is_local = conflict.is_followed and all(
            maker != FED and is_inside(maker, conflict.module) for maker in conflict.makers
        )
        if layer_of(conflict.module, self._stacks) is not None and not is_local:
            self._unite(conflict)
            return
        before = self.devices()
        self._name([maker for maker in conflict.makers if maker in self._gates])
        self._links.append((conflict.makers, conflict))
        if self.devices() == before:
            self._unite(conflict)

    def _name(self, gates: list[str]) -> None:
        new = [gate for gate in gates if gate not in self.units]
        self.units = self.placed.in_order([*self.units, *new])

    def _unite(self, conflict: Conflict) -> None:
        """Make a module and everything inside it one unit."""
        module = conflict.module
        rest = [unit for unit in self.units if not is_inside(unit, module)]
        self.units = self.placed.in_order([*rest, module])
        self._whole[module] = conflict

        def now(name: str) -> str:
            return module if name != FED and is_inside(name, module) else name

        self._links = [
            (tuple(dict.fromkeys(map(now, makers))), cause) for makers, cause in self._links
        ]

    def _met(self, conflict: Conflict) -> str:
        return (
            f"{self._told(conflict)} wants what {conflict.origins} give on one device, and "
            "only the inputs of modules are moved"
        )

    def _told(self, conflict: Conflict) -> str:
        return conflict.told(self.placed.model)
