"""Hooks that run every module of a step on its device, for any caller.

:func:`replaced` replaces the tensors in lists, dicts and other torch pytrees.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from envs.executors.hooks.mixed_devices import Copies, MixedDevices

WRITABLE: Final = (list, dict, OrderedDict, defaultdict, deque)
"""Mutable containers whose identity matters: others see what is put into them."""


def replaced(
    tree: Any,
    tensor_for: Callable[[torch.Tensor], torch.Tensor],
    into: list[Any] | None = None,
) -> Any:
    """Return the tree with every tensor replaced; parts without changes are the same objects.

    Without ``into``, changed containers are created anew. With it, mutable ones are changed in
    place, and appended to it whether changed or not.
    """
    if isinstance(tree, torch.Tensor):
        return tensor_for(tree)
    inner, spec = tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if inner and inner[0] is tree:
        return tree
    outer = [replaced(one, tensor_for, into) for one in inner]
    writable = into is not None and type(tree) in WRITABLE
    if into is not None and writable:
        into.append(tree)
    if all(new is one for new, one in zip(outer, inner, strict=True)):
        return tree
    if not writable:
        return tree_unflatten(outer, spec)
    for place, new in zip(tree if isinstance(tree, dict) else range(len(tree)), outer, strict=True):
        tree[place] = new
    return tree


@dataclass(frozen=True, slots=True)
class ModuleDevice:
    """The device of a module.

    If it ``gathers``, its inputs and the outputs of its submodules are sent there; a mere container
    of other modules does not.
    """

    device: torch.device
    gathers: bool


@dataclass(frozen=True, slots=True, eq=False)
class _ModuleCall:
    """A call of a module, what was sent for it, and the lists and dicts it was given."""

    on: ModuleDevice
    copies: Copies
    containers: list[Any] = field(default_factory=list)

    def give_back(self) -> None:
        """Put the original tensors back into the lists and dicts."""
        for container in self.containers:
            replaced(container, self.copies.original_or_self, [])


class ModuleHooks:
    """Sends tensors along with the calls of modules, in every thread that makes some.

    What a module writes in place into a tensor that was sent to it is written back, and where it
    returns that tensor its caller gets the original. Lists and dicts that it is given are those of
    its caller, who sees what the module puts into them; during the call they hold the tensors that
    were sent.

    Args:
        devices: of all modules; may change between steps.
        outside: of the code that calls the outermost ones.
    """

    def __init__(self, devices: Mapping[nn.Module, ModuleDevice], outside: ModuleDevice) -> None:
        self.devices = devices
        self.outside = outside
        self._threads = threading.local()
        self._hooks = [
            hook
            for module in devices
            for hook in (
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            )
        ]

    @contextmanager
    def outside_modules(self) -> Iterator[None]:
        """Run the code that calls the outermost modules in this context."""
        depth = len(self._stack())
        self._enter(self.outside)
        try:
            yield
        finally:
            while len(self._stack()) > depth:  # hooks are not called on Ctrl-C
                self._leave()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _stack(self) -> list[_ModuleCall]:
        stack: list[_ModuleCall] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def _running_on(self) -> torch.device:
        return self._stack()[-1].on.device

    def _enter(self, on: ModuleDevice) -> _ModuleCall:
        stack = self._stack()
        if not stack:
            self._threads.mixed_devices = MixedDevices(self._running_on)
            self._threads.mixed_devices.__enter__()
        elif not on.gathers:
            on = ModuleDevice(stack[-1].on.device, gathers=False)
        stack.append(_ModuleCall(on, Copies(on.device)))
        return stack[-1]

    def _leave(self) -> _ModuleCall:
        stack = self._stack()
        if len(stack) == 1:
            self._threads.mixed_devices.__exit__(None, None, None)
        call = stack.pop()
        call.give_back()
        return call

    def _before(self, module: nn.Module, args: Any, keywords: Any) -> Any:
        call = self._enter(self.devices[module])
        if not call.on.gathers:
            return None
        send = call.copies.of
        named = {name: replaced(value, send, call.containers) for name, value in keywords.items()}
        return replaced(args, send, call.containers), named

    def _after(self, module: nn.Module, args: Any, keywords: Any, outputs: Any) -> Any:
        call, stack = self._leave(), self._stack()
        call.copies.write_back()
        if not stack or not stack[-1].on.gathers:
            return outputs
        device = stack[-1].on.device

        def handed_on(tensor: torch.Tensor) -> torch.Tensor:
            original = call.copies.original(tensor)
            return tensor.to(device) if original is None else original

        for container in call.containers:
            replaced(container, handed_on, [])
        return replaced(outputs, handed_on)
