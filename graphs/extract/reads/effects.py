"""Effects of a model's code that no op of a trace shows: such a step is not traced.

A traced step draws random numbers from the generators of its process, even if the model seeds them.
A tensor whose memory the model replaces, by ``x.data = y`` or ``x.set_(y)``, would keep its old
value, and a parameter that it freezes for a part of a step would be trained as a whole. The model's
own code does all this, where it is placed by its modules.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from graphs.extract.errors import is_skipped, replaced, running_line
from graphs.workload import ExtractionError, Workload

SEEDING: Final = ("manual_seed", "seed", "set_rng_state", "fork_rng")
"""Functions of torch.random, of which torch has most under its own name."""
_TRACING: Final = threading.RLock()
"""Functions are replaced for the whole process, so one thread traces at a time."""


@contextlib.contextmanager
def effects_refused(step: Workload) -> Iterator[None]:
    """Raise ExtractionError, meanwhile, if code outside of torch has an effect that is no op.

    Seeds are noticed where functions are called by their names in torch or ``torch.random``.
    """
    with _TRACING, replaced(*_seeding(), *_new_memory(), *_new_training(step)):
        yield


def _seeding() -> Iterator[tuple[Any, str, Any]]:
    for owner in (torch, torch.random):
        for name in SEEDING:
            if (function := vars(owner).get(name)) is not None:
                yield owner, name, _refused(function, "seeds torch's random numbers")


def _new_memory() -> Iterator[tuple[Any, str, Any]]:
    data: Any = torch._C.TensorBase.data
    what = "replaces the memory of a tensor"
    yield torch.Tensor, "data", property(data.__get__, _refused(data.__set__, what))
    yield torch.Tensor, "set_", _refused(torch._C.TensorBase.set_, what)


def _new_training(step: Workload) -> Iterator[tuple[Any, str, Any]]:
    """Yield what changes which parameters of the step are trained."""

    def changes(tensor: torch.Tensor, requires_grad: bool = True) -> bool:
        if not step.training or tensor.requires_grad is requires_grad:
            return False
        return any(tensor is own for own in step.named_state().values())

    def any_changes(module: nn.Module, requires_grad: bool = True) -> bool:
        return any(changes(parameter, requires_grad) for parameter in module.parameters())

    requires: Any = torch._C.TensorBase.requires_grad
    what = "changes which parameters are trained"
    assign = _refused(requires.__set__, what, changes)
    call = _refused(torch._C.TensorBase.requires_grad_, what, changes)
    yield torch.Tensor, "requires_grad", property(requires.__get__, assign)
    yield torch.Tensor, "requires_grad_", call
    yield nn.Module, "requires_grad_", _refused(nn.Module.requires_grad_, what, any_changes)


def _caller(frame: FrameType) -> FrameType:
    """Return a frame, or, of functions like torch's, as modules of devices have, their caller's."""
    while frame.f_code.co_name in SEEDING and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _refused(
    original: Callable[..., Any], what: str, matters: Callable[..., bool] = lambda *_, **__: True
) -> Callable[..., Any]:
    """Return a function of torch that raises where the model's own code calls it, if it matters."""
    thread = threading.get_ident()

    def checked(*args: Any, **keywords: Any) -> Any:
        is_of_model = threading.get_ident() == thread and not is_skipped(_caller(sys._getframe(1)))
        if is_of_model and matters(*args, **keywords):
            raise ExtractionError(
                f"the model {what} ({running_line()}), which a graph of ops cannot show; place it "
                "by its modules"
            )
        return original(*args, **keywords)

    return checked
