"""Checks that a step can be extracted at all, made before any extractor is tried."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from graphs.extract.calls import module_paths
from graphs.extract.step import Step, StepError


def check_step(step: Step) -> None:
    """Raise if the step is at fault as it is given.

    Raises:
        StepError: a parameter has no shape yet; or, in training, none requires a gradient, or one
            would have a sparse gradient.
    """
    name = type(step.model).__name__
    state = step.named_state()
    if unshaped := [own for own, tensor in state.items() if is_lazy(tensor)]:
        raise StepError(
            f"{unshaped[0]} of {name} has no shape until the model has run: run the model once "
            "first, on the example inputs"
        )
    if not step.training:
        return
    if not any(tensor.requires_grad for tensor in state.values()):
        raise StepError(
            f"{name} has no parameter that requires a gradient, so there is nothing to train; "
            "place inference"
        )
    for module, path in module_paths(step).items():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise StepError(
                f"{type(module).__name__} {path or name} has sparse gradients, which a placed "
                "step cannot hand over; make it with sparse=False"
            )
