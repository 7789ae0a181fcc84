"""Which modules accelerate's ``dispatch_model`` hooks, and where each sends what goes into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from placer.export.placed_modules import around, is_inside, parent

HOST = "cpu"


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where a dispatched model computes, see ``attach_align_device_hook_on_blocks`` of accelerate.

    ``runs_on`` is {module of the map: device it computes on}. ``sends_to`` has every module that is
    hooked, with the device that its inputs are sent to: those of the map, and inside of them all
    with a state. The latter are hooked by the outermost one around them.
    """

    runs_on: Mapping[str, str]
    sends_to: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, device_of: Mapping[str, str], main_device: str) -> Hooks:
        """The hooks of a map, {module: device}, of a model that is fed on the main device.

        What the map gives to the CPU is offloaded, and computes on the main device; so does what it
        gives to the model as a whole, beside others.
        """
        runs_on = {
            path: main_device if device == HOST or not path else device
            for path, device in device_of.items()
        }
        sends_to = dict(runs_on)
        for path in _with_state(model) - runs_on.keys():
            if (outer := _outermost(path, runs_on)) is not None:
                sends_to[path] = runs_on[outer]
        sends_to[""] = main_device
        return cls(runs_on, sends_to)

    def entering(self, module: str, made_in: str) -> str | None:
        """The device that a value of one module's code has in another's, None where it was made."""
        while not is_inside(made_in, module):
            if module in self.sends_to:
                return self.sends_to[module]
            module = parent(module)
        return None


def _with_state(model: nn.Module) -> set[str]:
    """The modules that have an entry in the state dict, in them or further inside."""
    found: set[str] = set()
    for name in model.state_dict():
        path = name
        while path and (path := parent(path)) not in found:
            found.add(path)
    return found


def _outermost(path: str, modules: Mapping[str, str]) -> str | None:
    """The outermost of these modules that a path is in, None if it is in none."""
    found, inner = None, around(path, modules)
    while inner is not None:
        found = inner
        inner = around(parent(inner), modules) if inner else None
    return found
