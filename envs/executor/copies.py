"""Copies of tensors on another device, for one call that may write into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class Copies:
    """Provides a call on a device with copies of the tensors that are elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[int, _Copy] = {}  # by id of the original
        self._originals: dict[int, torch.Tensor] = {}  # by their own id and that of the copy

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device; the same one at every call."""
        self._originals[id(tensor)] = tensor
        if tensor.device == self.device:
            return tensor
        if id(tensor) not in self._copies:
            copy = tensor.to(self.device)
            version = None if copy.is_inference() else copy._version
            self._copies[id(tensor)] = _Copy(tensor, copy, version, copy.grad_fn)
            self._originals[id(copy)] = tensor
        return self._copies[id(tensor)].tensor

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the original of a tensor or its copy, or None if the call made it."""
        return self._originals.get(id(tensor))

    def given_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the original of a copy; other tensors are returned as they are."""
        return self._originals.get(id(tensor), tensor)

    def write_back(self, *, uncounted: bool = False) -> None:
        """Write what was written to the copies into their originals.

        With ``uncounted``, the call may have written without raising the version of a tensor, as
        torch does with running statistics: then values are compared.
        """
        for copy in self._copies.values():
            if copy.is_written(uncounted=uncounted):
                tracked = copy.tensor.grad_fn is not copy.made_by
                with torch.set_grad_enabled(tracked and torch.is_grad_enabled()):
                    copy.original.copy_(copy.tensor)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    original: torch.Tensor
    tensor: torch.Tensor
    version: int | None
    """Version counter when copied; None in inference mode, where torch counts none."""
    made_by: Any
    """Its autograd node when copied."""

    def is_written(self, *, uncounted: bool) -> bool:
        if self.version is not None and self.tensor._version != self.version:
            return True
        if self.version is not None and (not uncounted or self.tensor.requires_grad):
            return False
        return not torch.equal(self.tensor, self.original.to(self.tensor.device))
