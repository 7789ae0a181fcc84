"""Refusing models that define parts of their backward pass which an extractor cannot follow.

Torch.export traces into a function that has its own backward and decomposes it; of checkpointing it
sees only the forward pass. Either way the traced step would be another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from graphs.extract.refusals import running_line
from graphs.extract.step import ExtractionError, Step, StepError


@contextlib.contextmanager
def own_backward_refused(
    step: Step, *, functions: bool = False, saving: bool = False
) -> Iterator[None]:
    """Raise, while a training step runs, if an extractor cannot follow its backward pass.

    Args:
        step: an inference step has no backward pass, and nothing is refused.
        functions: refuse functions with a backward of their own, except those of torch.
        saving: refuse hooks on saved tensors, as in activation checkpointing.

    Raises:
        StepError: reentrant checkpointing, which no extractor can follow.
        ExtractionError: the step does what is to be refused.
    """
    if not step.training:
        yield
        return
    name = type(step.model).__name__
    apply: Callable[..., Any] = Function.__dict__["apply"].__func__
    enter = saved_tensors_hooks.__enter__

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and issubclass(cls, CheckpointFunction):
            raise StepError(
                f"{name} uses reentrant checkpointing{_here()}, which starts backward passes of "
                "its own that cannot be placed; give use_reentrant=False"
            )
        if torch.is_grad_enabled() and functions and not cls.__module__.startswith("torch."):
            raise ExtractionError(
                f"{name} uses {cls.__name__}{_here()}, a function with a backward of its own, "
                "which torch.export does not keep"
            )
        return apply(cls, *args, **kwargs)

    def entered(hooks: saved_tensors_hooks) -> None:
        if torch.is_grad_enabled() and saving:
            raise ExtractionError(
                f"{name} has a way of its own to save tensors for the backward pass{_here()}, "
                "such as activation checkpointing, which only a recording shows (dispatch)"
            )
        enter(hooks)

    # Torch has no hook for these calls, so the methods themselves are replaced meanwhile.
    Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


def _here() -> str:
    line = running_line()
    return f" ({line})" if line else ""
