"""Hooks that run every module of a step on its device, whatever calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from envs.executor.meeting import Meeting


@dataclass(frozen=True, slots=True)
class Seat:
    """The device of a module.

    One that does ``gather`` has its inputs and what it gets from its modules sent there; a mere
    container of others has not.
    """

    device: torch.device
    gathers: bool


@dataclass(slots=True, eq=False)
class _Visit:
    """A call of a module, and what was sent for it."""

    seat: Seat
    sent: dict[int, _Sent] = field(default_factory=dict)  # by id of the original


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    original: torch.Tensor
    copy: torch.Tensor
    version: int


class Visits:
    """Sends tensors along with the calls of modules, in every thread that makes some.

    What a module writes in place into a tensor that was sent to it is written back, and where it
    returns that tensor its caller gets the original.

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
        """Run the code that calls the outermost modules."""
        depth = len(self._stack())
        self._enter(self.own)
        try:
            yield
        finally:
            while len(self._stack()) > depth:  # hooks do not hear of Ctrl-C
                self._leave()

    def close(self) -> None:
        """Take the hooks off."""
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
        stack.append(_Visit(seat))
        return stack[-1]

    def _leave(self) -> _Visit:
        stack = self._stack()
        if len(stack) == 1:
            self._threads.meeting.__exit__(None, None, None)
        return stack.pop()

    def _before(self, module: nn.Module, args: Any, keywords: Any) -> Any:
        visit = self._enter(self.seats[module])
        if not visit.seat.gathers:
            return None
        device = visit.seat.device

        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == device:
                return tensor
            if id(tensor) not in visit.sent:
                copy = tensor.to(device)
                visit.sent[id(tensor)] = _Sent(tensor, copy, copy._version)
            return visit.sent[id(tensor)].copy

        return tree_map_only(torch.Tensor, gathered, (args, keywords))

    def _after(self, module: nn.Module, args: Any, keywords: Any, outputs: Any) -> Any:
        visit, stack = self._leave(), self._stack()
        for sent in visit.sent.values():
            if sent.copy._version != sent.version:
                sent.original.copy_(sent.copy)
        if not stack or not stack[-1].seat.gathers:
            return outputs
        device = stack[-1].seat.device
        original = {id(sent.copy): sent.original for sent in visit.sent.values()}

        def handed_on(tensor: torch.Tensor) -> torch.Tensor:
            return original.get(id(tensor), tensor).to(device)

        return tree_map_only(torch.Tensor, handed_on, outputs)
