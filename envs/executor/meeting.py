"""Moves tensors that meet in one operation of a model's own code to one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from envs.executor.copies import Copies

APART: Final = frozenset(
    {
        *("__get__", "__set__", "to", "copy_", "set_", "backward", "grad"),
        *("type_as", "view_as", "expand_as", "reshape_as"),
    }
)
"""Operations that accept tensors on several devices, or use the data of the first one only."""
UNCOUNTED: Final = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Operations that write running statistics, which autograd does not track."""


class Meeting(TorchFunctionMode):
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
        if name in APART or name.startswith("_foreach"):
            return func(*args, **kwargs)
        devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if len(devices) > 1:
            written = _written(name, args, kwargs)
            device = self._running_on() if written is None else written.device
            copies = Copies(device)
            args, kwargs = tree_map_only(torch.Tensor, copies.of, (args, kwargs))
            found = func(*args, **kwargs)
            copies.write_back(uncounted=name in UNCOUNTED)
            return tree_map_only(torch.Tensor, copies.given_back, found)
        return func(*args, **kwargs)


def sent(tensors: Any, device: torch.device) -> Any:
    """Return the tree with all tensors on a device; those already there are the same objects."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tensors)


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that an operation writes in place or as ``out``, or None."""
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name == "__setitem__" or name.startswith("__i"):
        found = args[0] if args else kwargs.get("input")
    else:
        found = kwargs.get("out")
    return found if isinstance(found, torch.Tensor) else None
