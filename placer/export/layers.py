"""Stacks of layers in a model: lists of modules of one class that run in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from placer.export.placed_modules import is_inside


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of layers of one class: path of the list and of its members, in order."""

    path: str
    layers: tuple[str, ...]


def stacks(model: nn.Module) -> list[Stack]:
    """Return outermost stacks: ModuleLists or Sequentials of two or more modules of one class.

    >>> stacks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    [Stack(path='', layers=('0', '1'))]
    """
    found: list[Stack] = []
    for path, module in model.named_modules():
        if any(is_inside(path, known.path) for known in found):
            continue
        members = list(module.children())
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_list and len(members) > 1 and len({type(member) for member in members}) == 1:
            prefix = f"{path}." if path else ""
            found.append(Stack(path, tuple(prefix + name for name, _ in module.named_children())))
    return found


def layer_of(module: str, found: list[Stack]) -> str | None:
    """Return the layer that contains a module, None if there is none."""
    return next(
        (layer for stack in found for layer in stack.layers if is_inside(module, layer)), None
    )
