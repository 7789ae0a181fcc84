"""Paths of the modules of a model: what is inside what, and stacks of layers.

Modules are named by their path in the model; a layer is a member of a stack of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from placer.exports.renaming import ExportError


def check_has_weights(model: nn.Module) -> None:
    """Check that a model has parameters or buffers, which are what formats by module place."""
    if not [*model.parameters(), *model.buffers()]:
        name = type(model).__name__
        raise ExportError(f"{name} has no parameters or buffers: no module of it can be placed")


def parent(module: str) -> str:
    """Return the path of the module around another."""
    return module.rpartition(".")[0]


def around(path: str, modules: Container[str]) -> str | None:
    """Return the innermost of some modules that contains a path, None if there is none."""
    while path not in modules:
        if not path:
            return None
        path = parent(path)
    return path


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """Return {path of a module: its first path}; a shared module has several paths."""
    first = {id(module): path for path, module in model.named_modules()}
    return {path: first[id(m)] for path, m in model.named_modules(remove_duplicate=False)}


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: a ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def is_inside(module: str, outer: str) -> bool:
    """Return whether a module is another one or inside it."""
    return not outer or module == outer or module.startswith(outer + ".")


def whole_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the outermost modules that transformers and accelerate never divide.

    Models of transformers name the classes of these modules in ``_no_split_modules``.
    """
    classes = frozenset(getattr(model, "_no_split_modules", None) or ())
    found: list[str] = []
    for path, module in model.named_modules():
        if path and type(module).__name__ in classes and around(path, found) is None:
            found.append(path)
    return tuple(found)


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
    outermost: list[Stack] = []
    for path, module in model.named_modules():
        if any(is_inside(path, known.path) for known in outermost):
            continue
        members = list(module.children())
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_list and len(members) > 1 and len({type(member) for member in members}) == 1:
            prefix = f"{path}." if path else ""
            outermost.append(
                Stack(path, tuple(prefix + name for name, _ in module.named_children()))
            )
    return outermost


def layer_of(module: str, model_stacks: Iterable[Stack]) -> str | None:
    """Return the layer that contains a module, None if there is none."""
    layers = (layer for stack in model_stacks for layer in stack.layers)
    return next((layer for layer in layers if is_inside(module, layer)), None)


def units_of(
    module: nn.Module, path: str, is_kept: Callable[[nn.Module, str], bool]
) -> Iterator[str]:
    """Yield the outermost modules inside a module, or itself, that are kept whole."""
    if is_kept(module, path):
        yield path
        return
    for name, child in module.named_children():
        yield from units_of(child, f"{path}.{name}" if path else name, is_kept)


def has_own(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers of its own."""
    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])
