"""Why a step cannot be taken, in the words of whoever gave it: what torch said, where, what to do.

Torch itself is kept from talking meanwhile: its reasons are in its exceptions.
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
"""Whoever called the code of this file is not the model."""
TORCH: Final = str(Path(torch.__file__).parent)
PYTHON: Final = str(Path(logging.__file__).parent.parent)
DATA_DEPENDENT: Final = {
    "GuardOnDataDependentSymNode": "its control flow depends on the values in a tensor",
    "DataDependentOutputException": "its control flow depends on the values in a tensor",
    "DynamicOutputShapeException": "the size of what {} returns depends on the values in a tensor",
}
"""Torch's exceptions for what no fixed graph can hold, and what they mean; {} is their message."""

UNDECODED: Final = "Unable to cast Python instance of type <class 'str'>"
"""What torch says of a line of code whose file has a name that is not UTF-8."""
ADDRESS: Final = re.compile(
    r"<(?:\w+\.)*(?:<locals>\.)?(?P<what>[^<>]+?)(?: object)? at 0x[0-9a-fA-F]+>"
)
METHOD: Final = re.compile(r"<(?:slot wrapper|method) '(?P<what>[^']*)' of '[^']*' objects>")
"""How Python shows objects, for people to leave out."""


def explained(step: Step, error: Exception, verb: str) -> str:
    """What torch says in its first line, the line of the model, and what can be done about it.

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
    """What to say of an error on the way from what torch has traced to a graph."""
    return (
        f"{type(step.model).__name__} was traced, but no graph comes out of the trace: "
        f"{type(error).__name__}: {first_line(error)}. Another extractor may take it."
    )


def first_line(error: Exception) -> str:
    r"""The first line of an error, without the addresses of objects and the full stop.

    >>> first_line(TypeError("no <__main__.Batch object at 0x7f63> here.\nSee above"))
    'no Batch here'
    """
    told = next(iter(_lines(error)), type(error).__name__)
    told = ADDRESS.sub(r"\g<what>", METHOD.sub(r"\g<what>", told))
    return textwrap.shorten(told.rstrip(". "), 300, placeholder=" [...]")


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def sentences(*parts: str) -> str:
    """Parts of a message one after another, each with one full stop.

    >>> sentences("It fails", "Try again.")
    'It fails. Try again.'
    """
    return " ".join(f"{part.rstrip('. ')}." for part in parts)


def raised_at(error: Exception) -> str:
    """The innermost line of the model's code on the way to an error, "" if there is none."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        if _is_of_model(trace.tb_frame):
            found = _line(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def running_line() -> str:
    """The innermost line of the model's code that is running, "" if there is none."""
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
    """The refusal of a model that changes what it is given."""
    return StepError(f"the model writes into {which} in place; clone it first")


def wants_input_gradient(which: str) -> StepError:
    """The refusal of an input that requires a gradient."""
    return StepError(
        f"tensor {which} of the inputs requires a gradient, but a placed step hands back "
        "gradients of parameters only; detach it first"
    )


def loss_without_gradient(step: Step) -> StepError:
    """The refusal of a training step without a backward pass."""
    return StepError(
        f"the loss of {type(step.model).__name__} does not depend on any parameter that requires "
        "a gradient, so there is no backward pass: look for torch.no_grad() and detach() on the "
        "way to it, or place inference"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from talking while it traces.

    It prints whole graphs and tracebacks to stderr when an export fails, though the reason is in
    the exception, and warns of what it does itself. Threads of the model that cannot be traced fail
    in words of their own.
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
