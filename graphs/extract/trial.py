"""Plain runs of a step, to see whether the model works at all on its inputs.

A model on the meta device runs on fake tensors of the CPU. They have shapes and devices but no
memory, so that a model of any size can be traced. The meta device itself will not do: its ops are
not those of a device that runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from graphs.extract.autocast import autocast
from graphs.extract.refusals import DATA_DEPENDENT, explained, loss_without_gradient, quiet
from graphs.extract.substitute import in_its_mode, on_copies, substituted, with_distinct_inputs
from graphs.workload import ExtractionError, LossModule, StepError, Workload

Leaf = TypeVar("Leaf")


@contextlib.contextmanager
def without_meta(step: Workload) -> Iterator[Workload]:
    """Yield the step on fake tensors, or as it is if nothing is on the meta device.

    The model is the same object; on exit it has its own parameters and buffers back.
    """
    if not _has_meta(step.named_state()):
        yield step
        return
    fakes = _Fakes()
    with substituted(step, fakes.of):
        yield replace(
            step,
            inputs=tree_map(fakes.of, step.inputs),
            keywords=tree_map(fakes.of, dict(step.keywords)),
        )


def check_has_memory(step: Workload) -> None:
    """Raise if the step cannot be run because tensors of it are on the meta device.

    Raises:
        ExtractionError: it has such tensors.
    """
    for what, tensors in (
        ("parameters", step.named_state()),
        ("inputs", (step.inputs, dict(step.keywords))),
    ):
        if _has_meta(tensors):
            raise ExtractionError(
                f"{what} of {type(step.model).__name__} are on the meta device, which has shapes "
                "but no values, so that nothing can be run or measured: make them on the CPU, or "
                "extract the graph alone (placer extract --costs none)"
            )


def _has_meta(tensors: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(tensors))


class _Fakes:
    """Makes one fake tensor for each tensor, so that tied parameters stay tied."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[int, torch.Tensor] = {}

    def of(self, leaf: Leaf) -> Leaf | torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.known:
            with self.mode:
                fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                fake.requires_grad_(leaf.requires_grad)
            if isinstance(leaf, nn.Parameter):
                fake = nn.Parameter(fake.detach(), requires_grad=leaf.requires_grad)
            self.known[id(leaf)] = fake
        return self.known[id(leaf)]


def check_runs(step: Workload) -> None:
    """Run the forward pass once, by torch alone; the model is left as it was.

    Raises:
        StepError: it fails, or in training its loss has no backward pass, so that no extractor can
            help.
    """
    try:
        with quiet(), in_its_mode(step), runnable(step) as copy:
            check_differentiable(copy, forward_of(copy))
    except ExtractionError:
        raise
    except Exception as error:
        if type(error).__name__ not in DATA_DEPENDENT:  # fake tensors have no values to read
            raise StepError(explained(step, error, "run")) from error


@contextlib.contextmanager
def runnable(step: Workload) -> Iterator[Workload]:
    """Yield the step on copies, or on fake tensors if the model is on the meta device."""
    if any(tensor.is_meta for tensor in step.named_state().values()):
        with without_meta(step) as fake:
            yield with_distinct_inputs(fake)
    else:
        with on_copies(step) as copy:
            yield copy


def try_fakes(step: Workload) -> None:
    """Run a step once if it is on fake tensors, without any dispatch mode.

    Torch ends the process if an op on fake tensors fails under a dispatch mode; here it raises.
    """
    if any(isinstance(tensor, FakeTensor) for tensor in step.named_state().values()):
        forward_of(step)


def forward_of(step: Workload) -> object:
    """Return the loss of a training step, or the model's output of an inference step.

    Raises:
        StepError: a training step has no scalar loss.
    """
    with autocast(step.dtype):
        if step.training:
            loss: torch.Tensor = LossModule(step)(*step.inputs, **step.keywords)
            return loss
        return step.model(*step.model_inputs, **step.keywords)


def check_differentiable(step: Workload, found: object) -> None:
    """Raise if the loss of a training step, as a plain run gives it, has no backward pass.

    Raises:
        StepError: the loss depends on no parameter that requires a gradient.
    """
    if step.training and not (isinstance(found, torch.Tensor) and found.requires_grad):
        raise loss_without_gradient(step)
