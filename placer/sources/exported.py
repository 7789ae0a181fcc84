"""``model.pt2``: a program that ``torch.export.save`` wrote, with the example inputs in it.

Nothing in the file is ever unpickled into objects: torch would do so for what is not a tensor, so
that such files are refused before torch reads them.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch

from graphs.extract import Step
from placer.missing_file import missing_file, why_not_read
from placer.sources.fault import TargetError

SUFFIX: Final = ".pt2"
HARMLESS: Final = (
    "models/*.json",
    "data/weights/weight_*",
    "data/weights/*.json",
    "data/constants/tensor_*",
    "data/constants/*.json",
    "data/sample_inputs/*.pt",
    "extra/*",
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/*",
)
"""Members of an archive that hold tensors, numbers and text; without the folder they are in."""
ONLY_WEIGHTS: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Forbids torch.load to unpickle anything but tensors, whatever its callers ask for."""


def load(path: Path, *, training: bool) -> Step:
    """The inference step of an exported program on the example inputs it was saved with.

    Raises:
        TargetError: there is no such file, torch did not write it or has saved other objects than
            tensors in it, it has no example inputs, or a training step is asked for.
    """
    if training:
        raise TargetError(
            f"{path} is an exported program, whose mode is part of it, and can be placed for "
            "inference only: add --inference. To place training, give the function that makes the "
            "model: path/to/model.py:function"
        )
    _check_members(path)
    try:
        with _only_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of its own reading
            program = torch.export.load(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TargetError(f"torch cannot load {path}: {reason or type(error).__name__}") from error
    if program.example_inputs is None:
        raise TargetError(f"{path} was saved without example inputs, so there is no step to place")
    model = program.module(check_guards=False)
    for module in model.modules():
        module.training = False  # train() and eval() refuse: the mode is part of the program
    inputs, keywords = program.example_inputs
    return Step(model, tuple(inputs), dict(keywords), training=False)


def _check_members(path: Path) -> None:
    if not path.is_file():
        raise TargetError(missing_file(path))
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise TargetError(f"{path} is not a program that torch.export.save wrote") from error
    except OSError as error:
        raise TargetError(why_not_read(error)) from error
    for name in names:
        inner = name.partition("/")[2]
        if not any(fnmatchcase(inner, pattern) for pattern in HARMLESS):
            raise TargetError(
                f"{path} holds {name!r}, which is neither a tensor nor part of the graph; placer "
                "does not unpickle objects. Save it anew with torch.export.save, without custom "
                "objects"
            )


@contextmanager
def _only_weights() -> Iterator[None]:
    before = os.environ.get(ONLY_WEIGHTS)
    os.environ[ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ONLY_WEIGHTS]
        else:
            os.environ[ONLY_WEIGHTS] = before
