"""Plain runs of a step, to see whether the model works at all on its inputs.

A model on the meta device runs on fake tensors of the CPU. They have shapes and devices but no
memory, so that a model of any size can be traced. The meta device itself will not do: its ops are
not those of a device that runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from graphs.extract.autocast import autocast
from graphs.extract.errors import DATA_DEPENDENT, explained, loss_without_gradient, quiet
from graphs.extract.model_state import (
    copier,
    in_step_mode,
    on_copies,
    substituted,
    tracing,
    with_distinct_inputs,
    with_inputs,
)
from graphs.workload import ExtractionError, StepError, Workload, training_loss


@contextlib.contextmanager
def without_meta(step: Workload) -> Iterator[Workload]:
    """Yield the step on fake tensors, or as it is if no parameter is on the meta device.

    The model is the same object; on exit it has its own parameters and buffers back.
    """
    if not _has_meta(step.named_state()):
        yield step
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    copy_of = copier(fake)
    with substituted(step, copy_of):
        yield with_inputs(step, copy_of)


def check_has_memory(step: Workload) -> None:
    """Raise ExtractionError if the step cannot run because tensors are on the meta device."""
    for what, tensors in (
        ("parameters", step.named_state()),
        ("inputs", (step.inputs, dict(step.keywords))),
    ):
        if _has_meta(tensors):
            raise ExtractionError(
                f"{what} of {type(step.model).__name__} are on the meta device, which has shapes "
                "but no values, so that nothing can be run or measured: make them on the CPU, or "
                "extract the graph without costs",
                remedy="no costs",
            )


def _has_meta(tensors: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(tensors))


@contextlib.contextmanager
def runnable(step: Workload) -> Iterator[Workload]:
    """Yield the step on copies, or on fake tensors if the model is on the meta device."""
    if _has_meta(step.named_state()):
        with without_meta(step) as fake:
            yield with_distinct_inputs(fake)
    else:
        with on_copies(step) as copy:
            yield copy


def run_step(step: Workload) -> object:
    """Return the loss of a training step (StepError if not scalar), else the model's output."""
    with autocast(step.dtype):
        if step.training:
            return training_loss(step.model, step.loss, step.inputs, step.keywords)
        return step.model(*step.model_inputs, **step.keywords)


def try_fakes(step: Workload) -> None:
    """Run a step once if it is on fake tensors, without any dispatch mode.

    Torch ends the process if an op on fake tensors fails under a dispatch mode; here it raises.
    """
    if has_no_values(step):
        run_step(step)


def has_no_values(step: Workload) -> bool:
    """Return whether a step is on fake tensors."""
    return any(isinstance(tensor, FakeTensor) for tensor in step.named_state().values())


def check_runs(step: Workload) -> None:
    """Run the forward pass once, by torch alone; the model is left as it was.

    If it fails, or in training its loss has no backward pass, no extractor can help: StepError.
    """
    try:
        with quiet(), in_step_mode(step), runnable(step) as copy:
            _check_differentiable(copy, run_step(copy))
    except ExtractionError:
        raise
    except Exception as error:
        if type(error).__name__ not in DATA_DEPENDENT:  # fake tensors have no values to read
            raise explained(step, error, "run", StepError) from error


def _check_differentiable(step: Workload, result: object) -> None:
    if step.training and not (isinstance(result, torch.Tensor) and result.requires_grad):
        raise loss_without_gradient(step)


def check_gradients(step: Workload, traced: Collection[str]) -> None:
    """Raise if a traced training step, with gradients of these parameters, lacks some of torch's.

    The loss need not depend on every parameter; if one has no gradient, a plain run of the step
    shows whether it should have.
    """
    state = step.named_state()
    ids = {id(state[name]) for name in traced}
    trained = {id(tensor): name for name, tensor in reversed(state.items()) if tensor.requires_grad}
    missing = {name for identity, name in trained.items() if identity not in ids}
    if not missing:
        return
    lost = sorted(missing & (computed := _with_gradient(step)))
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ExtractionError(
            f"torch computes a gradient for {lost[0]}{more}, but the traced step of "
            f"{type(step.model).__name__} does not: some of its backward pass is hidden from "
            "tracing, as in a function that starts a backward pass of its own, or the model takes "
            "another path every time"
        )
    if not computed:
        raise loss_without_gradient(step)


def _with_gradient(step: Workload) -> set[str]:
    """Return the names of state that torch computes gradients for; the model is left as it was."""
    with tracing(step, "run"), runnable(step) as copy:
        loss = run_step(copy)
        _check_differentiable(copy, loss)
        state = copy.named_state()
        for tensor in state.values():
            tensor.grad = None
        loss.backward()  # type: ignore[attr-defined]  # a training step returns its loss
        return {name for name, tensor in state.items() if tensor.grad is not None}
