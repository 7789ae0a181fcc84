"""Plain runs of a step, to see whether the model works at all on its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphs.extract.autocast import autocast
from graphs.extract.fake import without_meta
from graphs.extract.refusals import DATA_DEPENDENT, explained, loss_without_gradient, quiet
from graphs.extract.step import ExtractionError, LossModule, Step, StepError
from graphs.extract.substitute import in_its_mode, on_copies, with_distinct_inputs


def check_runs(step: Step) -> None:
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
def runnable(step: Step) -> Iterator[Step]:
    """Yield the step on copies, or on fake tensors if the model is on the meta device."""
    if any(tensor.is_meta for tensor in step.named_state().values()):
        with without_meta(step) as fake:
            yield with_distinct_inputs(fake)
    else:
        with on_copies(step) as copy:
            yield copy


def try_fakes(step: Step) -> None:
    """Run a step once if it is on fake tensors, without any dispatch mode.

    Torch ends the process if an op on fake tensors fails under a dispatch mode; here it raises.
    """
    if any(isinstance(tensor, FakeTensor) for tensor in step.named_state().values()):
        forward_of(step)


def forward_of(step: Step) -> object:
    """Return the loss of a training step, or the model's output of an inference step.

    Raises:
        StepError: a training step has no scalar loss.
    """
    with autocast(step.dtype):
        if step.training:
            loss: torch.Tensor = LossModule(step)(*step.inputs, **step.keywords)
            return loss
        return step.model(*step.model_inputs, **step.keywords)


def check_differentiable(step: Step, found: object) -> None:
    """Raise if the loss of a training step, as a plain run gives it, has no backward pass.

    Raises:
        StepError: the loss depends on no parameter that requires a gradient.
    """
    if step.training and not (isinstance(found, torch.Tensor) and found.requires_grad):
        raise loss_without_gradient(step)
