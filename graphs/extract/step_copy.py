"""Copying a step whose model may keep computed tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphs.extract.step import Step


def step_copy(step: Step) -> Step:
    """Return a copy of a step: of the model, the loss function and the inputs.

    Tensors that the model keeps from an earlier forward pass, such as the ``weight`` of
    ``nn.utils``' ``weight_norm``, are copied without their history; torch alone would refuse to.
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
