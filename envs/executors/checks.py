"""Checks of what callers pass to a placed model: batches, learning rates, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from graphs.arguments import arguments, contexts_by_name, leaves_by_path
from graphs.extract import Workload
from graphs.inputs import keeps_no_more
from graphs.precision import FULL


class Composition:
    """The submodules, code and hooks of a step's model and loss, as of when it was placed."""

    def __init__(self, step: Workload) -> None:
        named = [each for root in _roots(step) for each in root.named_modules()]
        self._named = named
        self._code = [_code(module) for _, module in named]
        parts = [
            (name, part)
            for name, module in named
            for part in (
                module._modules,
                module._forward_pre_hooks,
                module._forward_hooks,
                module._backward_pre_hooks,
                module._backward_hooks,
            )
        ]
        self._names = [name for name, part in parts if not part]
        self._empty = [part for _, part in parts if not part]
        self._full = [(name, part, [*part.values()]) for name, part in parts if part]

    def check(self) -> None:
        """Raise ValueError if a submodule, its forward or a hook was added, removed or replaced."""
        code = [_code(module) for _, module in self._named]
        changed = []
        if code != self._code:
            pairs = zip(self._named, code, self._code, strict=True)
            changed = [name for (name, _), now, before in pairs if now != before]
        changed += [name for name, now, before in self._full if [*now.values()] != before]
        if any(self._empty):
            changed += [n for n, now in zip(self._names, self._empty, strict=True) if now]
        if changed:
            raise ValueError(
                f"{changed[0] or 'the model'} has other submodules, forwards or hooks now than "
                "when it was placed: optimize the model as it is now, and apply the new placement"
            )


class AsPlaced:
    """A step's model and loss as of when it was placed, to notice what a placed step would ignore.

    A model that was in eval mode as a whole may be in any: its training step is that of train mode.
    """

    def __init__(self, step: Workload) -> None:
        roots = _roots(step)
        self._dtype = step.dtype
        self._composition = Composition(step)
        self._modes = [
            (root, list(root.modules()), [module.training for module in root.modules()])
            for root in roots
            if step.training and root.training
        ]
        trained = [each for root in roots if step.training for each in root.named_parameters()]
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self._require = [parameter.requires_grad for parameter in self._parameters]

    def check(self) -> None:
        """Raise ValueError if the model would compute something else now."""
        for root, modules, modes in self._modes:
            if [module.training for module in modules] != modes:
                _check_modes(root, modes)
        self._composition.check()
        if self._dtype == FULL and torch.is_autocast_enabled("cpu"):
            raise ValueError(
                "autocast is on, and the step was placed without it: leave it off, or optimize "
                'with dtype="bf16"'
            )
        if any(parameter._backward_hooks for parameter in self._parameters):
            hooked = (
                n for n, p in zip(self._names, self._parameters, strict=True) if p._backward_hooks
            )
            raise ValueError(
                f"{next(hooked)} has a hook on its gradient (register_hook) now, which a placed "
                "step does not call: remove it, and change the gradient after the step"
            )
        if [parameter.requires_grad for parameter in self._parameters] != self._require:
            self._check_trained()

    def _check_trained(self) -> None:
        for name, parameter, trained in zip(
            self._names, self._parameters, self._require, strict=True
        ):
            if parameter.requires_grad is not trained:
                has, had = ("no", "one") if trained else ("a", "none")
                raise ValueError(
                    f"{name} has {has} gradient now (requires_grad), and had {had} when it was "
                    "placed: optimize the model as it is now, and apply the new placement"
                )


def _code(module: nn.Module) -> tuple[type, Any]:
    """Return the class of a module, and the forward that it has in place of that of its class."""
    return type(module), vars(module).get("forward")


def _roots(step: Workload) -> list[nn.Module]:
    owners = (step.model, step.loss if step.training else None)
    return [owner for owner in owners if isinstance(owner, nn.Module)]


def _check_modes(root: nn.Module, modes: Sequence[bool]) -> None:
    """Raise ValueError if a module is not in its mode, of those of a root in order."""
    for (name, module), training in zip(root.named_modules(), modes, strict=False):
        if training and not module.training:
            raise ValueError(
                f"{name or 'the model'} is in eval mode now, and a placed training step computes "
                "as in train mode: validate with the model itself, model(x), and call "
                "model.train() before the next step"
            )
        if module.training and not training:
            raise ValueError(
                f"{name} is in train mode now, and was in eval mode when it was placed: call its "
                ".eval() again after model.train()"
            )


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


@dataclass(frozen=True, slots=True)
class ExampleForm:
    """The form of a step's example inputs, by which a batch of the same form is known at once."""

    step: Workload
    examples: tuple[Any, ...]
    form: TreeSpec

    @classmethod
    def of(cls, step: Workload) -> ExampleForm:
        """Return the form of a step's inputs."""
        leaves, form = tree_flatten((step.step_inputs, dict(step.keywords)))
        return cls(step, tuple(leaves), form)

    def leaves(self, batch: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a batch, in any form, in the order of those of the example.

        Raises:
            ValueError: the batch does not match the example inputs.
        """
        call = arguments(batch[0]) if len(batch) == 1 and not keywords else (batch, dict(keywords))
        leaves, form = tree_flatten(call)
        alike = form == self.form and keeps_no_more(form)
        if alike and not any(map(_difference, leaves, self.examples)):
            return leaves
        return matched_leaves(self.step, *self.step.unpacked(batch, keywords))


def matched_leaves(step: Workload, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Return the leaves of a batch in the order of those of the example inputs.

    Args:
        step: the step that was extracted, with its example inputs.
        inputs: positional inputs, bound by :meth:`graphs.workload.Workload.bound`.
        keywords: further inputs, in any order.
    """
    batch = leaves_by_path(inputs, keywords)
    examples = leaves_by_path(step.step_inputs, step.keywords)
    if new := [_named(step, path) for path in batch if path not in examples]:
        raise ValueError(f"the batch holds {' and '.join(new)}, the example inputs do not")
    for path, example in examples.items():
        if path not in batch:
            raise ValueError(f"the batch lacks {_named(step, path)} of the example inputs")
        if wrong := _difference(batch[path], example):
            raise ValueError(f"{_named(step, path)} of the batch is {wrong}")
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


def _named(step: Workload, path: str) -> str:
    """Return what a leaf is: the target of the loss function, or the input at a path."""
    target = f"[{len(step.inputs) - 1}]" if step.loss is not None and step.training else "none"
    return f"the target{path[len(target) :]}" if path.startswith(target) else f"input {path}"


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _difference(leaf: object, example: object) -> str:
    """Return what a leaf of a batch is, and how it should be, "" if it is like the example."""
    if isinstance(leaf, np.ndarray):
        return "an array of numpy: give torch.from_numpy(x)"
    if not isinstance(example, torch.Tensor):
        if leaf is not example and (isinstance(leaf, torch.Tensor) or leaf != example):
            return (
                f"{leaf!r}, the placement was made for {example!r}: only tensors may change from "
                "batch to batch"
            )
    elif not isinstance(leaf, torch.Tensor):
        return f"{type(leaf).__name__}, not a tensor"
    elif leaf.shape != example.shape or leaf.dtype != example.dtype:
        if leaf.dtype != example.dtype and leaf.shape == example.shape:
            return (
                f"{leaf.dtype}, the placement was made for {example.dtype}: give it as "
                f"{example.dtype}, or place the step for {leaf.dtype}"
            )
        smaller = leaf.dtype == example.dtype and leaf.shape[1:] == example.shape[1:]
        advice = " (drop_last=True of a DataLoader leaves out a last, smaller batch)"
        return (
            f"{_form(leaf)}, the placement was made for {_form(example)}: place the step for "
            f"batches of this size{advice if smaller else ''}"
        )
    return ""
