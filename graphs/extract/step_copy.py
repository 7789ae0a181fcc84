"""A copy of a step whose model may keep tensors that were computed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphs.extract.step import Step


def step_copy(step: Step) -> Step:
    """A step of its own: copies of the model, the loss function and the inputs.

    What the model keeps of an earlier forward pass, such as the ``weight`` of ``nn.utils``'
    ``weight_norm``, is copied without its history, which torch alone would refuse.
    """
    with _WithoutHistory():
        return copy.deepcopy(step)


class _WithoutHistory(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
