"""The modules that accelerate's ``dispatch_model`` hooks, and where it sends their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from placer.export.placed_modules import around, is_inside, parent

HOST = "cpu"


@dataclass(frozen=True, slots=True)
class Hooks:
    """Hooks of a dispatched model, see accelerate's ``attach_align_device_hook_on_blocks``.

    ``runs_on`` is {module of the map: device that it computes on}. ``sends_to`` is {hooked module:
    device of its inputs}: modules of the map, and inside them all modules with state, which are
    hooked by the outermost module of the map around them.
    """

    runs_on: Mapping[str, str]
    sends_to: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, device_of: Mapping[str, str], main_device: str) -> Hooks:
        """Return the hooks of a map, {module: device}, for a model fed on the main device.

        Modules that the map puts on the CPU are offloaded and compute on the main device; so does
        the model as a whole, if the map names it beside others.
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
        """Return the device to which a value moves when it enters a module, None if it stays."""
        while not is_inside(made_in, module):
            if module in self.sends_to:
                return self.sends_to[module]
            module = parent(module)
        return None


def _with_state(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for name in model.state_dict():
        path = name
        while path and (path := parent(path)) not in found:
            found.add(path)
    return found


def _outermost(path: str, modules: Mapping[str, str]) -> str | None:
    found, inner = None, around(path, modules)
    while inner is not None:
        found = inner
        inner = around(parent(inner), modules) if inner else None
    return found
