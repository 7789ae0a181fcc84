"""Copies between the host and fake devices, with the guarantees that torch gives for CUDA.

* From or to the host a copy runs on the device's current stream, and the host waits for that
  stream, unless the copy is ``non_blocking``. Then, from page-locked memory, it is read when the
  stream gets there; from other memory it is taken at once. To the host it arrives in page-locked
  memory when the stream gets there.
* Between devices it runs on the current stream of the source, which waits for that of the
  destination first; the latter waits for the copy. The host goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tests.fake_cuda.streams import Stream
from tests.fake_cuda.tensors import CudaTensor


class Copier:
    """Issues copies; ``stream_of`` returns the current stream of a device."""

    def __init__(
        self,
        stream_of: Callable[[torch.device], Stream],
        is_pinned: Callable[[Tensor], bool],
        log: Callable[[torch.device, torch.device, int], None],
    ) -> None:
        self._stream_of = stream_of
        self._is_pinned = is_pinned
        self._log = log

    def copy(self, to: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Copy values into a tensor of the same shape, or one that its shape expands to."""
        if to.device != source.device:
            self._log(source.device, to.device, source.nbytes)
        if isinstance(to, CudaTensor):
            given = source.expected if isinstance(source, CudaTensor) else source.detach()
            with torch.no_grad():
                to.expected.copy_(given)
        if isinstance(source, CudaTensor) and isinstance(to, CudaTensor):
            self._between_devices(to, source)
        elif isinstance(source, CudaTensor):
            self._to_host(to, source, non_blocking=non_blocking and self._is_pinned(to))
        elif isinstance(to, CudaTensor):
            self._from_host(to, source, non_blocking=non_blocking)

    def _between_devices(self, to: CudaTensor, source: CudaTensor) -> None:
        running, waiting = self._stream_of(source.device), self._stream_of(to.device)
        target, values = to.elements, source.elements
        if running is not waiting:
            running.wait_stream(waiting)
        running.queues.issue(running, lambda: target.copy_(values))
        if running is not waiting:
            waiting.wait_stream(running)

    def _from_host(self, to: CudaTensor, source: Tensor, *, non_blocking: bool) -> None:
        stream = self._stream_of(to.device)
        target = to.elements
        is_read_later = non_blocking and self._is_pinned(source)
        values = source.detach() if is_read_later else source.detach().clone()
        stream.queues.issue(stream, lambda: target.copy_(values))
        if not non_blocking:
            stream.synchronize()

    def _to_host(self, to: Tensor, source: CudaTensor, *, non_blocking: bool) -> None:
        stream = self._stream_of(source.device)
        target, values = to.detach(), source.elements
        stream.queues.issue(stream, lambda: target.copy_(values))
        if not non_blocking:
            stream.synchronize()


class Moved(torch.autograd.Function):
    """A copy on another device, whose gradient comes back with a copy that the host waits for."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, move: Callable[..., Tensor], to: torch.device) -> Tensor:
        ctx.move, ctx.source = move, tensor.device
        return move(tensor, to)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.move(gradient, ctx.source, non_blocking=False), None, None
