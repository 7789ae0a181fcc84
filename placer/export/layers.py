"""Stacks of layers in a model: lists of modules of one class that run one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from placer.export.placed_modules import is_inside


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of like layers: the path of the list and those of its members, in order."""

    path: str
    layers: tuple[str, ...]


def stacks(model: nn.Module) -> list[Stack]:
    """The outermost stacks of a model: a ModuleList or Sequential of at least two like members.

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
    """The layer that a module is in, None if it is in none."""
    return next(
        (layer for stack in found for layer in stack.layers if is_inside(module, layer)), None
    )
