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

from envs.executors.hooks.meeting import Copies, Meeting

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
    found = [replaced(one, tensor_for, into) for one in inner]
    writable = into is not None and type(tree) in WRITABLE
    if into is not None and writable:
        into.append(tree)
    if all(new is one for new, one in zip(found, inner, strict=True)):
        return tree
    if not writable:
        return tree_unflatten(found, spec)
    for place, new in zip(tree if isinstance(tree, dict) else range(len(tree)), found, strict=True):
        tree[place] = new
    return tree


@dataclass(frozen=True, slots=True)
class Seat:
    """The device of a module.

    If it ``gathers``, its inputs and the outputs of its submodules are sent there; a mere container
    of other modules does not.
    """

    device: torch.device
    gathers: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """A call of a module, what was sent for it, and the lists and dicts it was given."""

    seat: Seat
    copies: Copies
    given: list[Any] = field(default_factory=list)

    def give_back(self) -> None:
        """Put the original tensors back into the lists and dicts."""
        for container in self.given:
            replaced(container, self.copies.given_back, [])


class Visits:
    """Sends tensors along with the calls of modules, in every thread that makes some.

    What a module writes in place into a tensor that was sent to it is written back, and where it
    returns that tensor its caller gets the original. Lists and dicts that it is given are those of
    its caller, who sees what the module puts into them; during the call they hold the tensors that
    were sent.

    Args:
        seats: of all modules; may change between steps.
        own: of the code that calls the outermost ones.
    """

    def __init__(self, seats: Mapping[nn.Module, Seat], own: Seat) -> None:
        self.seats = seats
        self.own = own
        self._threads = threading.local()
        self._hooks = [
            hook
            for module in seats
            for hook in (
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            )
        ]

    @contextmanager
    def of_own_code(self) -> Iterator[None]:
        """Run the code that calls the outermost modules in this context."""
        depth = len(self._stack())
        self._enter(self.own)
        try:
            yield
        finally:
            while len(self._stack()) > depth:  # hooks are not called on Ctrl-C
                self._leave()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _stack(self) -> list[_Visit]:
        stack: list[_Visit] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def _running_on(self) -> torch.device:
        return self._stack()[-1].seat.device

    def _enter(self, seat: Seat) -> _Visit:
        stack = self._stack()
        if not stack:
            self._threads.meeting = Meeting(self._running_on)
            self._threads.meeting.__enter__()
        elif not seat.gathers:
            seat = Seat(stack[-1].seat.device, gathers=False)
        stack.append(_Visit(seat, Copies(seat.device)))
        return stack[-1]

    def _leave(self) -> _Visit:
        stack = self._stack()
        if len(stack) == 1:
            self._threads.meeting.__exit__(None, None, None)
        visit = stack.pop()
        visit.give_back()
        return visit

    def _before(self, module: nn.Module, args: Any, keywords: Any) -> Any:
        visit = self._enter(self.seats[module])
        if not visit.seat.gathers:
            return None
        send = visit.copies.of
        named = {name: replaced(value, send, visit.given) for name, value in keywords.items()}
        return replaced(args, send, visit.given), named

    def _after(self, module: nn.Module, args: Any, keywords: Any, outputs: Any) -> Any:
        visit, stack = self._leave(), self._stack()
        visit.copies.write_back()
        if not stack or not stack[-1].seat.gathers:
            return outputs
        device = stack[-1].seat.device

        def handed_on(tensor: torch.Tensor) -> torch.Tensor:
            given = visit.copies.original(tensor)
            return tensor.to(device) if given is None else given

        for container in visit.given:
            replaced(container, handed_on, [])
        return replaced(outputs, handed_on)
