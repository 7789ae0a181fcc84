"""The batch of a step: its size, and equal parts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from graphs.extract import Workload


def batch_size(step: Workload) -> int | None:
    """Return the first dimension that all input tensors share, None if they differ."""
    sizes: set[int] = set()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _mapped((step.inputs, dict(step.keywords)), add)
    return sizes.pop() if len(sizes) == 1 else None


def with_part_of_inputs(step: Workload, parts: int) -> Workload | None:
    """Return the step on the first of ``parts`` equal parts of its batch; None if not divisible.

    The batch is the first dimension of all inputs, see :func:`batch_size`.
    """
    size = batch_size(step)
    if size is None or size % parts:
        return None
    inputs, keywords = part_of_batch((step.inputs, dict(step.keywords)), parts)
    return replace(step, inputs=inputs, keywords=keywords)


def part_of_batch(values: Any, parts: int, index: int = 0) -> Any:
    """Return one of equal parts of all tensors in nested values, along their first dimension.

    Tensors without dimensions are the same in every part.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        size, rest = divmod(len(tensor), parts)
        if rest or not size:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} in a batch cannot be cut into {parts} "
                "equal parts"
            )
        return tensor[index * size : (index + 1) * size]

    return _mapped(values, cut)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, change, value)
