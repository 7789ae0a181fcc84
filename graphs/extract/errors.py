"""Errors about steps that cannot be extracted: torch's reason, the line of the model, advice.

Torch's own output is suppressed meanwhile: its reasons are in its exceptions.

Models that define parts of their backward pass are refused too, where an extractor cannot follow:
of checkpointing, for one, torch.export sees only the forward pass, and the traced step would be
another one.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.autograd import function as autograd_function
from torch.autograd import graph as autograd_graph
from torch.autograd.function import Function, _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from graphs import workload
from graphs.precision import FULL
from graphs.text import first_line
from graphs.workload import ExtractionError, StepError, Workload

FOLDER: Final = Path(__file__).parent
PROJECT: Final = (str(FOLDER), workload.__file__)
STARTS: Final = {
    (str(FOLDER / "dispatch.py"), "record"),
    (str(FOLDER / "eager.py"), "check_runs"),
    (str(FOLDER / "export" / "trace.py"), "trace"),
    (str(FOLDER / "export" / "trace.py"), "trace_forward"),
}
"""Callers of these functions are not the model, so that the search for its line stops there."""
TORCH: Final = str(Path(torch.__file__).parent / "_")[:-1]
PYTHON: Final = str(Path(logging.__file__).parent.parent / "_")[:-1]
"""TORCH and PYTHON end with a separator: other packages' names begin alike (torchvision)."""
READS_DATA: Final = "its control flow depends on the values in a tensor"
DATA_DEPENDENT: Final = {
    "GuardOnDataDependentSymNode": READS_DATA,
    "DataDependentOutputException": READS_DATA,
    "DynamicOutputShapeException": "the size of what {} returns depends on the values in a tensor",
}
"""Torch's exceptions for what no fixed graph can hold, explained; {} is the exception's message."""

UNDECODED: Final = "Unable to cast Python instance of type <class 'str'>"
"""Torch's message about a line of code in a file whose name is not UTF-8."""
ADDRESS: Final = re.compile(
    r"<(?:\w+\.)*(?:<locals>\.)?(?P<what>[^<>]+?)(?: object)? at 0x[0-9a-fA-F]+>"
)
METHOD: Final = re.compile(r"<(?:slot wrapper|method) '(?P<what>[^']*)' of '[^']*' objects>")
"""ADDRESS and METHOD match how Python shows objects, which messages shorten to a name."""


def explained(
    step: Workload, error: Exception, verb: str, kind: type[ExtractionError] = ExtractionError
) -> ExtractionError:
    """Return an error with torch's reason, the line of the model, and what can be done.

    ``verb`` is what cannot be done to the model, as in "exported". If it is not "run", the model is
    run next to see whether its inputs are at fault (:func:`graphs.extract.eager.check_runs`).
    """
    reason, advice, remedy = short_reason(error), "", None
    if verb == "run":
        advice = "The model must run on the example inputs as they are given"
        if step.loss is not None and "required positional argument" in reason:
            advice += "; the last of them is the target of the loss, unless target= gives it"
        if step.dtype != FULL:
            advice += (
                f", under torch.autocast in {step.dtype}; if it runs only without autocast, place "
                f"it in {FULL}"
            )
            remedy = FULL
    if type(error).__name__ in DATA_DEPENDENT:
        reason = DATA_DEPENDENT[type(error).__name__].format(reason)
        advice = (
            "Neither control flow nor the sizes of tensors may depend on values in tensors: "
            "compute both branches and choose with torch.where, or mask instead of selecting"
        )
        remedy = None
    if UNDECODED in reason:
        reason = "torch takes no file names that are not UTF-8"
        advice = "Rename the file of the model and the folders that it is in, or set PYTHONUTF8=1"
        remedy = None
    places = [line for line in _lines(error) if line.startswith('File "')]
    place = next(
        (
            place
            for place in reversed(places)
            if not any(file in place for file in (TORCH, *PROJECT))
        ),
        raised_at(error),
    )
    mode = "training step" if step.training else "inference"
    where = f" ({place})" if place else ""
    text = f"{type(step.model).__name__} cannot be {verb} for {mode}: {reason}{where}"
    return kind(sentences(text, *filter(None, [advice])), remedy=remedy)


def short_reason(error: Exception) -> str:
    r"""Return the first line of an error, without addresses of objects and the full stop.

    >>> short_reason(TypeError("no <__main__.Batch object at 0x7f63> here.\nSee above"))
    'no Batch here'
    """
    line = ADDRESS.sub(r"\g<what>", METHOD.sub(r"\g<what>", first_line(error)))
    return textwrap.shorten(line.rstrip(". "), 300, placeholder=" [...]")


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def sentences(*parts: str) -> str:
    """Join parts of a message, each with one full stop.

    >>> sentences("It fails", "Try again.")
    'It fails. Try again.'
    """
    return " ".join(f"{part.rstrip('. ')}." for part in parts)


def shown_lines(lines: tuple[str, ...], most: int = 3) -> str:
    """Return the first lines of code for people to read, and how many more there are.

    >>> shown_lines(("a", "b", "c", "d", "e"))
    'a; b; c; and 2 more'
    """
    more = len(lines) - most
    return "; ".join([*lines[:most], *([f"and {more} more"] if more > 0 else [])])


def raised_at(error: Exception) -> str:
    """Return the innermost line of the model's code in an error's traceback, "" if none."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if _is_of_model(trace.tb_frame):
            line = _line(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return line


def running_line() -> str:
    """Return the innermost line of the model's code that is running, "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_start(frame):
        if _is_of_model(frame):
            return line_of(frame)
        frame = frame.f_back
    return ""


def is_start(frame: FrameType) -> bool:
    """Return whether a frame is where the project starts a model, below all of the model's own."""
    return (frame.f_code.co_filename, frame.f_code.co_name) in STARTS


def is_skipped(frame: FrameType) -> bool:
    """Return whether a frame is of the project, of torch or of Python, not of a model."""
    file = frame.f_code.co_filename
    of_python = file.startswith(PYTHON) and "site-packages" not in file
    return of_python or file.startswith((*PROJECT, TORCH, "<frozen "))


def line_of(frame: FrameType, number: int | None = None) -> str:
    """Return the line of code that a frame is running, or the one with a number in its file."""
    return _line(frame, frame.f_lineno if number is None else number)


def _is_of_model(frame: FrameType) -> bool:
    return not is_skipped(frame) and not frame.f_code.co_filename.startswith("<")


def _line(frame: FrameType, number: int) -> str:
    return f'File "{frame.f_code.co_filename}", line {number}, in {frame.f_code.co_name}'


def writes_input(which: str) -> StepError:
    """Return the error for a model that writes into its inputs."""
    return StepError(f"the model writes into {which} in place; clone it first")


def writes_constant(path: str) -> ExtractionError:
    """Return the error for a model that writes into an attribute that is no state."""
    return ExtractionError(
        f"the model writes into {path}, which is neither a parameter nor a buffer; make it one "
        "with register_buffer"
    )


def wants_input_gradient(which: str) -> StepError:
    """Return the error for an input that requires a gradient."""
    return StepError(
        f"tensor {which} of the inputs requires a gradient, but a placed step hands back "
        "gradients of parameters only; detach it first"
    )


def unreturnable(value: object) -> ExtractionError:
    """Return the error for an output whose tensors torch cannot find."""
    kind = type(value).__name__
    without = "leave the cache out with use_cache=False, or " if "cache" in kind.lower() else ""
    return ExtractionError(
        f"the model returns a {kind}, whose tensors torch cannot find; {without}return tensors in "
        "tuples, lists or dicts"
    )


def loss_without_gradient(step: Workload) -> StepError:
    """Return the error for a training step without a backward pass."""
    return StepError(
        f"the loss of {type(step.model).__name__} does not depend on any parameter that requires "
        "a gradient, so there is no backward pass: look for torch.no_grad() and detach() on the "
        "way to it, or place inference"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's output while it traces.

    It prints whole graphs and tracebacks to stderr when an export fails, though the reason is in
    the exception, and warns about its own internals. Errors in threads that the model started are
    not printed, either.
    """
    before, hook = logging.root.manager.disable, threading.excepthook
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        threading.excepthook = hook


def unkept_function(cls: type[Function], reason: str) -> ExtractionError:
    """Return the error for a function that an export cannot keep; ``reason`` is a verb phrase."""
    line = running_line()
    return ExtractionError(
        f"the model uses {cls.__name__}{f' ({line})' if line else ''}, a function with a backward "
        f"of its own that {reason}, so that torch.export does not keep it"
    )


def writes_gradient(owner: type, parameter: str) -> ExtractionError:
    """Return the error for a backward pass, of a function or model, that writes a gradient."""
    where = ""
    if issubclass(owner, Function):
        own = owner.vjp if owner.backward is Function.backward else owner.backward
        code = inspect.unwrap(own).__code__
        where = f' (File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name})'
    return ExtractionError(
        f"the backward pass of {owner.__name__}{where} writes the gradient of {parameter} itself, "
        "which a traced step does not hand back: return it from the backward of a function that "
        "takes the parameter as an argument"
    )


Applied = Callable[[type[Function], Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Applies a function: takes its class, torch's way to apply it, and the arguments."""


@contextlib.contextmanager
def custom_backward_checked(
    step: Workload, *, functions: Applied | None = None, saving: bool = False
) -> Iterator[None]:
    """Raise, while a training step runs, if an extractor cannot follow its backward pass.

    Reentrant checkpointing, which no extractor can follow, is a StepError. ``functions`` is called
    in place of functions with a backward of their own, except torch's; hooks on gradients, and
    reads of ``grad_fn``, which may lead to such, and inference mode are refused then. With
    ``saving``, hooks on saved tensors are, as in activation checkpointing.
    """
    if not step.training:
        yield
        return
    name = type(step.model).__name__
    for path, module in step.model.named_modules() if functions is not None else ():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ExtractionError(
                f"{path or name} has a hook for its backward pass (register_full_backward_hook), "
                "which only a recording shows (dispatch)"
            )
    enter, enter_mode = saved_tensors_hooks.__enter__, torch.inference_mode.__enter__
    register: Callable[..., Any] = vars(torch.Tensor)["register_hook"]
    transformed: Callable[..., Any] = vars(autograd_function)["custom_function_call"]
    node: Any = inspect.getattr_static(torch.Tensor, "grad_fn")
    reading: list[torch.Tensor] = []

    def here() -> str:
        line = running_line()
        return f" ({line})" if line else ""

    def is_own(cls: type[Function]) -> bool:
        return torch.is_grad_enabled() and not cls.__module__.startswith("torch.")

    def checked_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        apply: Callable[..., Any] = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]  # of the metaclass
        if torch.is_grad_enabled() and issubclass(cls, CheckpointFunction):
            raise StepError(
                f"{name} uses reentrant checkpointing{here()}, which starts backward passes of "
                "its own that cannot be placed; give use_reentrant=False"
            )
        if functions is not None and is_own(cls):
            return functions(cls, apply, args, kwargs)
        return apply(*args, **kwargs)

    def checked_transformed(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if functions is not None and is_own(cls):
            raise unkept_function(cls, "torch.func transforms")
        return transformed(cls, *args, **kwargs)

    def checked_enter(hooks: saved_tensors_hooks) -> None:
        if torch.is_grad_enabled() and saving:
            raise ExtractionError(
                f"{name} has a way of its own to save tensors for the backward pass{here()}, "
                "such as activation checkpointing, which only a recording shows (dispatch)"
            )
        enter(hooks)

    def checked_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if functions is not None and torch.is_grad_enabled():
            raise ExtractionError(
                f"{name} changes or reads a gradient by a hook{here()} (Tensor.register_hook), "
                "which only a recording shows (dispatch)"
            )
        return register(tensor, hook)

    def checked_node(tensor: torch.Tensor) -> Any:
        caller = sys._getframe(1)
        is_of_model = not is_skipped(caller) or caller.f_code.co_filename == autograd_graph.__file__
        is_refused = functions is not None and torch.is_grad_enabled() and is_of_model
        if is_refused and not reading:
            raise ExtractionError(
                f"{name} takes a node of autograd{here()} (Tensor.grad_fn), to which it may add a "
                "hook, which only a recording shows (dispatch)"
            )
        reading.append(tensor)  # a mode of torch functions reads it once more
        try:
            return node.__get__(tensor)
        finally:
            reading.pop()

    def checked_mode(mode: torch.inference_mode) -> None:
        if functions is not None and mode.mode:
            raise ExtractionError(
                f"{name} computes a part without gradients{here()} (torch.inference_mode), which "
                "torch.export takes for a part with gradients; no_grad does the same"
            )
        enter_mode(mode)

    # Torch has no hook for these calls, so functions are replaced meanwhile: those that
    # Function.apply calls, since a model may hold that itself (``gelu = GeLU.apply``).
    with replaced(
        (_SingleLevelFunction, "apply", classmethod(checked_apply)),
        (autograd_function, "custom_function_call", checked_transformed),
        (saved_tensors_hooks, "__enter__", checked_enter),
        (torch.Tensor, "register_hook", checked_hook),
        (torch.Tensor, "grad_fn", property(checked_node)),
        (torch.inference_mode, "__enter__", checked_mode),
    ):
        yield


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes (owner, name, value) meanwhile, also within another of these contexts."""
    with contextlib.ExitStack() as restored:
        for owner, name, value in attributes:
            if name in vars(owner):
                restored.callback(setattr, owner, name, vars(owner)[name])
            else:  # it is of a base
                restored.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield
