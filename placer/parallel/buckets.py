"""Buckets: gradients that are reduced together, as views of one flat tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class GradientBucket(Protocol):
    """Gradients that a reduction receives; ``torch.distributed.GradBucket`` conforms to it."""

    def index(self) -> int:
        """Return its index among the buckets of its process group, in starting order."""
        ...

    def is_last(self) -> bool:
        """Return whether it is the last of them."""
        ...

    def buffer(self) -> torch.Tensor:
        """Return the flat gradients."""
        ...

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer, e.g. by one of another dtype, until the mean is available."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, shaped like the parameters."""
        ...

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the gradients, in the order of the buffer."""
        ...


class Pending(Protocol):
    """A running reduction."""

    def wait(self) -> object:
        """Wait until the mean over the ranks is in the bucket's buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter and its name in messages."""

    name: str
    parameter: nn.Parameter


class Bucket:
    """Parameters of one device and dtype, with gradients that are views of ``flat``.

    Each view keeps the memory order of its parameter, e.g. channels last.
    """

    def __init__(self, members: Sequence[Named], accumulate: int) -> None:
        first = members[0].parameter
        size = sum(member.parameter.numel() for member in members)
        self.members = members
        self.accumulate = accumulate
        self.flat = torch.zeros(size, device=first.device, dtype=first.dtype)
        self.pending: Pending | None = None
        self.place = (0, True)  # index in its queue, whether it is the last
        self._views = [
            _laid_out(piece, member.parameter)
            for piece, member in zip(self._pieces(self.flat), members, strict=True)
        ]
        self._arrived = [0] * len(members)
        self._missing = 0
        self.begin()

    def begin(self) -> None:
        """Expect the gradients of a new step."""
        self._buffer = self.flat
        self.pending = None
        self._arrived = [0] * len(self.members)
        self._missing = len(self.members) * self.accumulate

    @property
    def is_full(self) -> bool:
        """Return whether every gradient has arrived as often as expected."""
        return self._missing == 0

    def arrive(self, number: int) -> None:
        """Count an arrived gradient.

        Raises:
            RuntimeError: it arrived more often than expected.
        """
        self._arrived[number] += 1
        if self._arrived[number] > self.accumulate or self.pending is not None:
            raise RuntimeError(
                f"the gradient of {self.members[number].name} arrived once more than the "
                f"{self.accumulate} backward passes of a step: call finish() after each step, or "
                "give GradSync as many as accumulate"
            )
        self._missing -= 1
        self.adopt(number)

    @torch.no_grad()
    def adopt(self, number: int) -> None:
        """Make a parameter's gradient its view of the bucket again, keeping its current value.

        ``optimizer.zero_grad()`` drops the views; a missing gradient counts as zero.
        """
        parameter, view = self.members[number].parameter, self._views[number]
        given = parameter.grad
        if given is view:
            return
        if given is None:
            view.zero_()
        elif given.data_ptr() != view.data_ptr() or given.device != view.device:
            view.copy_(given)
        parameter.grad = view

    def adopt_all(self) -> None:
        """Adopt every gradient."""
        for number in range(len(self.members)):
            self.adopt(number)

    def index(self) -> int:
        """Return its index among the buckets of its process group."""
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
        return [member.parameter for member in self.members]

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [member.parameter.numel() for member in self.members]
        return [
            piece.view_as(member.parameter)
            for piece, member in zip(torch.split(flat, sizes), self.members, strict=True)
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
    filling: dict[tuple[torch.device, torch.dtype], list[Named]] = {}
    room: dict[tuple[torch.device, torch.dtype], int] = {}
    closed: list[list[Named]] = []
    for name, parameter in reversed(list(parameters.items())):
        if not parameter.requires_grad:
            continue
        key = (parameter.device, parameter.dtype)
        if key in filling and parameter.nbytes > room[key]:
            closed.append(filling.pop(key))
        if key not in filling:
            filling[key], room[key] = [], largest_bytes
        filling[key].append(Named(name, parameter))
        room[key] -= parameter.nbytes
    return [Bucket(members, accumulate) for members in (*closed, *filling.values())]
