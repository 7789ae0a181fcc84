"""Messages about steps that cannot be extracted: torch's reason, the line of the model, advice.

Torch's own output is suppressed meanwhile: its reasons are in its exceptions.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from graphs.extract.step import Step, StepError
from graphs.precision import FULL

OWN: Final = str(Path(__file__).parent)
RECORDING: Final = str(Path(OWN, "dispatch.py"))
"""Callers of this file's code are not the model, so that the search for its line stops here."""
TORCH: Final = str(Path(torch.__file__).parent)
PYTHON: Final = str(Path(logging.__file__).parent.parent)
DATA_DEPENDENT: Final = {
    "GuardOnDataDependentSymNode": "its control flow depends on the values in a tensor",
    "DataDependentOutputException": "its control flow depends on the values in a tensor",
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


def explained(step: Step, error: Exception, verb: str) -> str:
    """Return the first line of torch's error, the line of the model, and what can be done.

    ``verb`` is what cannot be done to the model, as in "exported".
    """
    lines, reason = _lines(error), first_line(error)
    advice = "The model must run on the example inputs as they are given"
    if step.dtype != FULL:
        advice += (
            f", under torch.autocast in {step.dtype}; if it does without autocast only, place it "
            f"with --dtype {FULL}"
        )
    if type(error).__name__ in DATA_DEPENDENT:
        reason = DATA_DEPENDENT[type(error).__name__].format(reason)
        advice = (
            "Neither control flow nor the sizes of tensors may depend on values in tensors: "
            "compute both branches and choose with torch.where, or mask instead of selecting"
        )
    if UNDECODED in reason:
        reason = "torch takes no file names that are not UTF-8"
        advice = "Rename the file of the model and the folders that it is in, or set PYTHONUTF8=1"
    places = [line for line in lines if line.startswith('File "')]
    place = next((p for p in reversed(places) if "torch/" not in p and OWN not in p), "")
    kind = "training step" if step.training else "inference"
    text = f"{type(step.model).__name__} cannot be {verb} for {kind}: {reason}"
    if place := place or raised_at(error):
        text += f" ({place})"
    return f"{text}. {advice}."


def unforeseen(step: Step, error: Exception) -> str:
    """Return a message about an unforeseen error between torch's trace and the graph."""
    return (
        f"{type(step.model).__name__} was traced, but no graph comes out of the trace: "
        f"{type(error).__name__}: {first_line(error)}. Another extractor may take it."
    )


def first_line(error: Exception) -> str:
    r"""Return the first line of an error, without addresses of objects and the full stop.

    >>> first_line(TypeError("no <__main__.Batch object at 0x7f63> here.\nSee above"))
    'no Batch here'
    """
    told = next(iter(_lines(error)), type(error).__name__)
    told = ADDRESS.sub(r"\g<what>", METHOD.sub(r"\g<what>", told))
    return textwrap.shorten(told.rstrip(". "), 300, placeholder=" [...]")


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def sentences(*parts: str) -> str:
    """Join parts of a message, each with one full stop.

    >>> sentences("It fails", "Try again.")
    'It fails. Try again.'
    """
    return " ".join(f"{part.rstrip('. ')}." for part in parts)


def raised_at(error: Exception) -> str:
    """Return the innermost line of the model's code in an error's traceback, "" if none."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        if _is_of_model(trace.tb_frame):
            found = _line(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def running_line() -> str:
    """Return the innermost line of the model's code that is running, "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _file(frame) != RECORDING:
        if _is_of_model(frame):
            return _line(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


def _is_of_model(frame: FrameType) -> bool:
    name = _file(frame)
    installed = "site-packages" in name
    return not name.startswith((OWN, TORCH, "<")) and (installed or not name.startswith(PYTHON))


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _line(frame: FrameType, number: int) -> str:
    return f'File "{_file(frame)}", line {number}, in {frame.f_code.co_name}'


def writes_input(which: str) -> StepError:
    """Return the error for a model that writes into its inputs."""
    return StepError(f"the model writes into {which} in place; clone it first")


def wants_input_gradient(which: str) -> StepError:
    """Return the error for an input that requires a gradient."""
    return StepError(
        f"tensor {which} of the inputs requires a gradient, but a placed step hands back "
        "gradients of parameters only; detach it first"
    )


def loss_without_gradient(step: Step) -> StepError:
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
