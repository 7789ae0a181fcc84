"""Operations of a model's own code on tensors of several devices, which are sent to one of them.

:class:`Copies` holds copies on another device for one call, which may write into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


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

    def original_or_self(self, tensor: torch.Tensor) -> torch.Tensor:
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


ANY_DEVICES: Final = frozenset(
    {
        *("__get__", "__set__", "to", "copy_", "set_", "backward", "grad"),
        *("type_as", "view_as", "expand_as", "reshape_as"),
    }
)
"""Operations that accept tensors on several devices, or use the data of the first one only."""
UNCOUNTED: Final = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Operations that write running statistics, which autograd does not track."""


class MixedDevices(TorchFunctionMode):
    """Sends the inputs of an operation that are on several devices to the one where the code runs.

    The target of an in-place operation stays, and the others are sent to it; other tensors that an
    operation writes are written back. Tensors that share one device are left where they are.
    """

    def __init__(self, running_on: Callable[[], torch.device]) -> None:
        super().__init__()
        self._running_on = running_on

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in ANY_DEVICES or name.startswith("_foreach"):
            return func(*args, **kwargs)
        devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if len(devices) > 1:
            written = _written_tensor(name, args, kwargs)
            device = self._running_on() if written is None else written.device
            copies = Copies(device)
            args, kwargs = tree_map_only(torch.Tensor, copies.of, (args, kwargs))
            result = func(*args, **kwargs)
            copies.write_back(uncounted=name in UNCOUNTED)
            return tree_map_only(torch.Tensor, copies.original_or_self, result)
        return func(*args, **kwargs)


def sent(tensors: Any, device: torch.device) -> Any:
    """Return the tree with all tensors on a device; those already there are the same objects."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tensors)


def _written_tensor(name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that an operation writes in place or as ``out``, or None."""
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name == "__setitem__" or name.startswith("__i"):
        target = args[0] if args else kwargs.get("input")
    else:
        target = kwargs.get("out")
    return target if isinstance(target, torch.Tensor) else None
