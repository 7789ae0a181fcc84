"""Copies between devices that overlap with compute.

With CUDA a copy runs on a stream of its own. It starts as soon as its tensor is made, and only its
reader waits for it: a stream by an event, the CPU until the event has happened. Copies from the
host go through page-locked memory, which is limited; a thread of its own writes what is large
there, and the thread that launches its reader waits until that is done. The gradient comes back the
same way. Between other devices a copy is a plain one.

Memory that one stream allocates and another uses is marked (``record_stream``), so that it is not
reused meanwhile. Between two accelerators torch copies on the current stream of the source, and
makes it and the current stream of the destination wait for each other; so the destination, too, has
a stream of its own for that. A tensor that is written in place must not be sent this way: the write
would not wait for the copy. Gradients are not: what else holds one finds that it is not alone.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from envs.executors.torch.staging import CopyEnd, HostSender

_HOST_SENDER: Final = HostSender()


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A copy in flight; ``end`` is None if it has already arrived."""

    copy: torch.Tensor
    end: CopyEnd | None


def sending(tensor: torch.Tensor, destination: torch.device) -> Sent:
    """Start to copy a tensor to another device; its gradient will be copied back."""
    if "cuda" not in (tensor.device.type, destination.type) or torch.compiler.is_compiling():
        return Sent(tensor.to(destination), None)
    trip = _Trip(tensor.device, destination)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return Sent(*trip.out(tensor))
    # torch leaves these calls untyped
    tensor = _Awaited.apply(tensor, trip)  # type: ignore[no-untyped-call]
    return Sent(_Carried.apply(tensor, trip), trip.end)  # type: ignore[no-untyped-call]


def arrived(sent: Sent) -> torch.Tensor:
    """Return the copy, for calls that are launched from here on."""
    device = sent.copy.device
    _wait(sent.end, torch.cuda.current_stream(device) if device.type == "cuda" else None)
    return sent.copy


class _Trip:
    """The transfer of a tensor to another device, and of its gradient back."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self.source = source
        self.destination = destination
        self.end: CopyEnd | None = None  # of the copy that was started last
        self._reader = torch.cuda.current_stream(source) if source.type == "cuda" else None

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, CopyEnd]:
        copy, self.end = _copied(tensor, self.destination)
        if copy.is_cuda:
            copy.record_stream(torch.cuda.current_stream(self.destination))
        return copy, self.end

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start the copy of the gradient."""
        copy, self.end = _copied(gradient, self.source)
        if self._reader is not None:
            copy.record_stream(self._reader)
        return copy

    def await_gradient(self) -> None:
        _wait(self.end, self._reader)


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
    """Identity; backward waits for the gradient to come back.

    It runs in the thread of the tensor's device, backward of the copy in that of the other one,
    which goes on.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.await_gradient()
        return gradient, None


def _copied(tensor: torch.Tensor, destination: torch.device) -> tuple[torch.Tensor, CopyEnd]:
    """Copy a tensor on a separate stream once it is made; return the copy and its end."""
    if tensor.device.type == "cpu":
        return _copied_from_host(tensor, destination)
    stream = _stream(tensor.device, "away")
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    last = stream
    with ExitStack() as current:
        if destination.type == "cuda":
            last = _stream(destination, "from others")  # waits for the other, may go on after it
            current.enter_context(torch.cuda.stream(last))
        current.enter_context(torch.cuda.stream(stream))
        copy = tensor.to(destination, non_blocking=True)
    tensor.record_stream(stream)
    return copy, last.record_event()


def _copied_from_host(
    tensor: torch.Tensor, destination: torch.device
) -> tuple[torch.Tensor, CopyEnd]:
    stream = _stream(destination, "from host")
    with ExitStack() as current:
        current.enter_context(torch.cuda.stream(stream))
        if not tensor.is_pinned():
            return _HOST_SENDER.send(tensor, stream)
        copy = tensor.to(destination, non_blocking=True)
    return copy, stream.record_event()


def _wait(end: CopyEnd | None, reader: torch.cuda.Stream | None) -> None:
    """Let a stream wait for the end of a copy, or the CPU if there is no reader."""
    event = end.result() if isinstance(end, Future) else end
    if event is None:
        return
    if reader is not None:
        reader.wait_event(event)
    else:
        event.synchronize()


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return one stream per device and direction: devices copy both ways at once."""
    del direction
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
