"""Steps with a smaller batch: the same model on a part of its example inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphs.extract import Step


def batch_size(step: Step) -> int | None:
    """The first dimension that all tensors among the inputs have in common, None if they differ."""
    sizes: set[int] = set()
    _mapped((step.inputs, dict(step.keywords)), lambda tensor: _noted(tensor, sizes))
    return sizes.pop() if len(sizes) == 1 else None


def with_part_of_inputs(step: Step, parts: int) -> Step | None:
    """The step on the first of ``parts`` equal parts of its batch; None where it has no such parts.

    The batch is the first dimension of all inputs, see :func:`batch_size`.
    """
    size = batch_size(step)
    if size is None or size % parts:
        return None

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.ndim == 0 else tensor[: size // parts]

    inputs, keywords = _mapped((step.inputs, dict(step.keywords)), cut)
    return replace(step, inputs=inputs, keywords=keywords)


def _noted(tensor: torch.Tensor, sizes: set[int]) -> torch.Tensor:
    if tensor.ndim:
        sizes.add(tensor.shape[0])
    return tensor


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor in tuples, lists and dicts changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
