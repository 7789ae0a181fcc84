"""Checks of what callers pass to a placed model: batches, learning rates, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphs.arguments import contexts_by_name, leaves_by_path
from graphs.extract import Workload


def checked_rate(rate: float) -> float:
    """Return a learning rate that is valid."""
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"learning rate {rate} is not a number >= 0")
    return rate


def load_optimizer_state(
    current: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    """Copy the state of an optimizer into its current one; names, shapes and dtypes must agree."""
    for name in sorted(current.keys() | state.keys()):
        here = _form(current[name]) if name in current else "nothing"
        there = _form(state[name]) if name in state else "nothing"
        if here != there:
            raise ValueError(f"{name} of the optimizer is {here} here, but {there} was given")
    for name, tensor in current.items():
        tensor.copy_(state[name])


def matched_leaves(step: Workload, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Return the leaves of a batch in the order of those of the example inputs.

    Args:
        step: the step that was extracted, with its example inputs.
        inputs: positional inputs, bound by :meth:`graphs.workload.Workload.bound`.
        keywords: further inputs, in any order.
    """
    batch = leaves_by_path(inputs, keywords)
    examples = leaves_by_path(step.step_inputs, step.keywords)
    for path in batch:
        if path not in examples:
            raise ValueError(f"the batch holds input {path}, the example inputs do not")
    for path, example in examples.items():
        if path not in batch:
            raise ValueError(f"the batch lacks input {path} of the example inputs")
        _check(path, batch[path], example)
    if not torch.compiler.is_compiling():
        _check_contexts(step, inputs, keywords)
    return [batch[path] for path in examples]


def _check_contexts(step: Workload, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    expected = contexts_by_name(step.step_inputs, step.keywords)
    if expected and expected != (given := contexts_by_name(inputs, keywords)):
        name = next(name for name in expected if expected[name] != given.get(name))
        raise ValueError(
            f"input [{name!r}] of the batch differs from that of the example in more than its "
            "tensors, and only tensors may change from batch to batch"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check(path: str, leaf: object, example: object) -> None:
    if isinstance(leaf, np.ndarray):
        raise ValueError(
            f"input {path} of the batch is an array of numpy: give torch.from_numpy(x)"
        )
    if not isinstance(example, torch.Tensor):
        if leaf is not example and (isinstance(leaf, torch.Tensor) or leaf != example):
            raise ValueError(
                f"input {path} of the batch is {leaf!r}, the placement was made for {example!r}: "
                "only tensors may change from batch to batch"
            )
    elif not isinstance(leaf, torch.Tensor):
        raise ValueError(f"input {path} of the batch is {type(leaf).__name__}, not a tensor")
    elif leaf.shape != example.shape or leaf.dtype != example.dtype:
        raise ValueError(
            f"input {path} of the batch is {_form(leaf)}, the "
            f"placement was made for {_form(example)}"
        )
