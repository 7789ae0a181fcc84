"""Buckets: gradients that are reduced together, as views of one flat tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn


class Pending(Protocol):
    """A running reduction."""

    def wait(self) -> object:
        """Wait until the mean over the ranks is in the bucket's buffer."""
        ...


class Bucket:
    """Parameters of one device and dtype, with gradients that are views of ``flat``.

    Each view keeps the memory order of its parameter, e.g. channels last. The methods that
    reductions call are those of ``torch.distributed.GradBucket``, so that they serve DDP, too.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], accumulate: int) -> None:
        self.names = tuple(parameters)
        self.accumulate = accumulate
        self._parameters = list(parameters.values())
        first, size = self._parameters[0], sum(p.numel() for p in self._parameters)
        self.flat = torch.zeros(size, device=first.device, dtype=first.dtype)
        self.pending: Pending | None = None
        self.place = (0, True)  # index in its queue, whether it is the last
        self._views = [
            _laid_out(piece, parameter)
            for piece, parameter in zip(self._pieces(self.flat), self._parameters, strict=True)
        ]
        self.begin()

    def begin(self) -> None:
        """Expect the gradients of a new step."""
        self._buffer = self.flat
        # A thread of gloo that drops the last reference to a work acquires the GIL, which aborts
        # the process while the interpreter ends: this reference outlives the thread's.
        self._finished = self.pending if self.flat.device.type == "cpu" else None
        self.pending = None
        self._streams: set[torch.cuda.Stream] = set()  # on which gradients arrived
        self._arrived = [0] * len(self.names)
        self._missing = len(self.names) * self.accumulate

    @property
    def is_full(self) -> bool:
        """Return whether every gradient has arrived as often as expected."""
        return self._missing == 0

    def arrive(self, number: int) -> None:
        """Count an arrived gradient; a RuntimeError if it arrived more often than expected."""
        self._arrived[number] += 1
        if self._arrived[number] > self.accumulate or self.pending is not None:
            raise RuntimeError(
                f"the gradient of {self.names[number]} arrived once more than the "
                f"{self.accumulate} backward passes of a step: call finish() after each step, or "
                "pass their number to GradSync as accumulate"
            )
        self._missing -= 1
        self._adopt(number)
        if self.flat.is_cuda:
            self._streams.add(torch.cuda.current_stream(self.flat.device))

    def await_gradients(self) -> None:
        """Let the current stream wait for gradients that arrived on others.

        The thread of autograd for another device may start the reduction, and its current stream
        here is the default one.
        """
        for stream in self._streams:
            torch.cuda.current_stream(self.flat.device).wait_stream(stream)

    @torch.no_grad()
    def _adopt(self, number: int) -> None:
        # Makes a parameter's gradient its view of the bucket again, keeping its current value.
        # ``optimizer.zero_grad()`` drops the views; a missing gradient counts as zero.
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() != view.data_ptr() or gradient.device != view.device:
            view.copy_(gradient)
        parameter.grad = view

    def adopt_all(self) -> None:
        """Make every gradient a view of the bucket again, keeping its value."""
        for number in range(len(self.names)):
            self._adopt(number)

    def index(self) -> int:
        """Return its index among the buckets of its process group, in starting order."""
        return self.place[0]

    def is_last(self) -> bool:
        """Return whether it is the last of them."""
        return self.place[1]

    def buffer(self) -> torch.Tensor:
        """Return the flat gradients."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let a hook send another tensor; the gradients themselves stay in place."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, shaped like the parameters and contiguous, as in DDP."""
        return self._pieces(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of the buffer."""
        return list(self._parameters)

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return [
            piece.view_as(parameter)
            for piece, parameter in zip(pieces, self._parameters, strict=True)
        ]


def _laid_out(piece: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    # Autograd expects gradients with the strides of their parameter; possible if these are dense.
    dense = torch.empty_like(parameter, device="meta").stride()  # keeps only dense strides
    if parameter.stride() != dense:
        return piece
    return piece.as_strided(piece.shape, dense)


def filled_buckets(
    parameters: Mapping[str, nn.Parameter], largest_bytes: int, accumulate: int
) -> list[Bucket]:
    """Return buckets of at most ``largest_bytes``, one device and dtype each, earliest ready first.

    The backward pass reaches the last parameters first. A parameter larger than a bucket gets its
    own; parameters that need no gradient get none.
    """
    filling: dict[tuple[torch.device, torch.dtype], dict[str, nn.Parameter]] = {}
    closed: list[dict[str, nn.Parameter]] = []
    for name, parameter in reversed(list(parameters.items())):
        if not parameter.requires_grad:
            continue
        key = (parameter.device, parameter.dtype)
        size = sum(other.nbytes for other in filling.get(key, {}).values())
        if size and size + parameter.nbytes > largest_bytes:
            closed.append(filling.pop(key))
        filling.setdefault(key, {})[name] = parameter
    return [Bucket(members, accumulate) for members in (*closed, *filling.values())]
