"""Copies between devices that overlap with compute.

With CUDA a copy runs on a stream of its own. It starts as soon as its tensor is made, and only its
reader waits for it: a stream by an event, the CPU until the event has happened. Copies from the
host go through page-locked memory, which is limited. The gradient comes back the same way. Between
other devices a copy is a plain one.

Memory that one stream allocates and another uses is marked (``record_stream``), so that it is not
reused meanwhile. Between two accelerators torch copies on the current stream of the source, and
makes it and the current stream of the destination wait for each other; so the destination, too, has
a stream of its own for that. A tensor that is written in place must not be sent this way: the write
would not wait for the copy.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from envs.executors.torch.staging import Staging

_STAGING: Final = Staging()


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A copy in flight; ``event`` is None if it has already arrived."""

    copy: torch.Tensor
    event: torch.cuda.Event | None


def sending(tensor: torch.Tensor, destination: torch.device) -> Sent:
    """Start to copy a tensor to another device; its gradient will be copied back."""
    if "cuda" not in (tensor.device.type, destination.type) or torch.compiler.is_compiling():
        return Sent(tensor.to(destination), None)
    trip = _Trip(tensor.device, destination)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return Sent(*trip.out(tensor))
    if tensor.device.type == "cpu":
        tensor = _Awaited.apply(tensor, trip)  # type: ignore[no-untyped-call]  # torch leaves it so
    # torch leaves this call untyped.
    return Sent(_Carried.apply(tensor, trip), trip.event)  # type: ignore[no-untyped-call]


def arrived(sent: Sent) -> torch.Tensor:
    """Return the copy, for calls that are launched from here on."""
    _wait(sent.event, sent.copy.device)
    return sent.copy


class _Trip:
    """The transfer of a tensor to another device, and of its gradient back."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self.source = source
        self.destination = destination
        self.event: torch.cuda.Event | None = None  # of the copy that was started last
        self.reader = torch.cuda.current_stream(source) if source.type == "cuda" else None

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        copy, self.event = _copied(tensor, self.destination)
        if copy.is_cuda:
            copy.record_stream(torch.cuda.current_stream(self.destination))
        return copy, self.event

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start the copy of the gradient; a stream that reads it waits, the CPU does not yet."""
        copy, self.event = _copied(gradient, self.source)
        if self.reader is not None:
            # Earlier than needed: other work of the source waits, too. Waiting where the gradient
            # is read would take a node like _Awaited; to be tried on a GPU.
            self.reader.wait_event(self.event)
            copy.record_stream(self.reader)
        return copy


class _Carried(torch.autograd.Function):
    """Copies a tensor, and backward its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.out(tensor)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.trip.back(gradient), None


class _Awaited(torch.autograd.Function):
    """Identity on a tensor of the host; backward waits for its gradient to come back.

    Backward of its copy runs in the thread of an accelerator, which must not wait.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _wait(ctx.trip.event, ctx.trip.source)
        return gradient, None


def _copied(
    tensor: torch.Tensor, destination: torch.device
) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Copy a tensor on a separate stream once it is made; return the copy and its end."""
    from_host = tensor.device.type == "cpu"
    stream = _stream(destination, "from host") if from_host else _stream(tensor.device, "away")
    if not from_host:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
    last = stream
    with ExitStack() as current:
        if not from_host and destination.type == "cuda":
            last = _stream(destination, "from others")  # waits for the other, may go on after it
            current.enter_context(torch.cuda.stream(last))
        current.enter_context(torch.cuda.stream(stream))
        if from_host and not tensor.is_pinned():
            copy = _STAGING.send(tensor, stream)
        else:
            copy = tensor.to(destination, non_blocking=True)
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return copy, last.record_event()


def _wait(event: torch.cuda.Event | None, reader: torch.device) -> None:
    if event is None:
        return
    if reader.type == "cuda":
        torch.cuda.current_stream(reader).wait_event(event)
    else:
        event.synchronize()


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return one stream per device and direction: devices copy both ways at once."""
    del direction
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
