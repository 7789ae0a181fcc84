"""State of a step in an arena: copies of its parameters, buffers and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from envs.executors.cores.arena import Arena
from graphs.extract import Workload


def load_example(arena: Arena, step: Workload) -> None:
    """Copy the parameters, buffers and example inputs of a step into the arena.

    An optimizer starts, and stays, at its first step with a learning rate of 0: it does all its
    work, but the parameters stay as they are however often the step runs.
    """
    load_state(arena, step)
    load_batch(arena, step, step.inputs, step.keywords)
    begin_updates(arena, learning_rate=0.0)
    count_update(arena)


def begin_updates(arena: Arena, learning_rate: float) -> None:
    """Reset the state of the step's optimizer, if it has one, and set its learning rate."""
    for source in arena.program.sources:
        if source.role in ("optimizer", "step_count"):
            arena.value(source.value).zero_()
        elif source.role == "learning_rate":
            arena.value(source.value).fill_(learning_rate)


def count_update(arena: Arena) -> None:
    """Increment the optimizer's step counts for the next step."""
    for source in arena.program.sources:
        if source.role == "step_count":
            arena.value(source.value).add_(1.0)


def checked_rate(rate: float) -> float:
    """Return a learning rate that is valid.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"learning rate {rate} is not a number >= 0")
    return rate


def load_kept(kept: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Copy the state of an optimizer into the one kept here.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    for name in sorted(kept.keys() | state.keys()):
        here = _form(kept[name]) if name in kept else "nothing"
        given = _form(state[name]) if name in state else "nothing"
        if here != given:
            raise ValueError(f"{name} of the optimizer is {here} here, but {given} was given")
    for name, tensor in kept.items():
        tensor.copy_(state[name])


def load_state(arena: Arena, step: Workload) -> None:
    """Copy the parameters and buffers of a step into the arena."""
    state = step.named_state()
    for source in arena.program.sources:
        if source.role in ("parameter", "buffer"):
            arena.value(source.value).copy_(state[source.name].detach())


def load_batch(
    arena: Arena, step: Workload, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Copy the tensors of a batch into the arena.

    Raises:
        ValueError: as :func:`matched_leaves`.
    """
    slots = {int(s.name): s.value for s in arena.program.sources if s.role == "input"}
    leaves = matched_leaves(step, inputs, keywords)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    for number, tensor in enumerate(tensors):
        if number in slots:
            arena.value(slots[number]).copy_(tensor.detach())


def matched_leaves(step: Workload, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Return the leaves of a batch in the order of those of the example inputs.

    Args:
        step: the step that was extracted, with its example inputs.
        inputs: positional inputs; of an inference step with a loss, with or without target.
        keywords: further inputs, in any order.

    Raises:
        ValueError: an input is missing or unexpected, has another shape or dtype than in the
            example, or is not a tensor and has another value.
    """
    if len(inputs) == len(step.inputs) > len(step.step_inputs):
        inputs = inputs[:-1]
    given = leaves_by_path(inputs, keywords)
    examples = leaves_by_path(step.step_inputs, step.keywords)
    for path in given:
        if path not in examples:
            raise ValueError(f"the batch holds input {path}, the example inputs do not")
    for path, example in examples.items():
        if path not in given:
            raise ValueError(f"the batch lacks input {path} of the example inputs")
        _check(path, given[path], example)
    return [given[path] for path in examples]


def unpacked(
    step: Workload, batch: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return positional and keyword inputs, also of a batch that is one tuple, list or mapping."""
    expected = leaves_by_path(step.step_inputs, step.keywords).keys()
    if len(batch) == 1 and not keywords and leaves_by_path(batch, {}).keys() != expected:
        only = batch[0]
        if isinstance(only, tuple | list):
            return only, {}
        if isinstance(only, Mapping):
            return (), only
    return batch, keywords


def leaves_by_path(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return every leaf of a batch by its path, such as ``[0]`` or ``['mask']``."""
    positional = tree_flatten_with_path(tuple(inputs))[0]
    named = tree_flatten_with_path(dict(keywords))[0]
    return {keystr(path): leaf for path, leaf in (*positional, *named)}


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check(path: str, given: object, example: object) -> None:
    if not isinstance(example, torch.Tensor):
        if given is not example and (isinstance(given, torch.Tensor) or given != example):
            raise ValueError(
                f"input {path} of the batch is {given!r}, the placement was made for {example!r}: "
                "only tensors may change from batch to batch"
            )
    elif not isinstance(given, torch.Tensor):
        raise ValueError(f"input {path} of the batch is {type(given).__name__}, not a tensor")
    elif given.shape != example.shape or given.dtype != example.dtype:
        raise ValueError(
            f"input {path} of the batch is {given.dtype} of shape {tuple(given.shape)}, the "
            f"placement was made for {example.dtype} of shape {tuple(example.shape)}"
        )
