"""``model.pt2``: a program written by ``torch.export.save``, with its example inputs.

torch runs code from a file that it loads: objects are unpickled, expressions and names are
evaluated. Therefore the file is read once, and its content is checked before torch loads it.
"""

from __future__ import annotations

import inspect
import io
import warnings
from pathlib import Path

from torch.export.pt2_archive import _package
from torch.utils._pytree import tree_structure

from envs.hardware.discover import available_memory_bytes
from graphs.extract import Workload
from graphs.files import file_error_message, missing_file, read_limited
from graphs.strict_json import brief
from placer.sources.exported_check import check_archive
from placer.sources.fault import TargetError, quiet


def load(path: Path, *, training: bool) -> Workload:
    """Return the inference step of an exported program on its saved example inputs.

    Raises:
        TargetError: there is no such file, torch did not write it, it holds objects other than
            tensors, it has no example inputs, or a training step is requested.
    """
    if training:
        raise TargetError(
            f"{path} is an exported program, whose mode is part of it, and can be placed for "
            "inference only: add --inference. To place training, give the function that makes the "
            "model: path/to/model.py:function"
        )
    content = _checked(path)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own reading
            # Like torch.export.load without tracebacks and formats before 2.8, which hold pickles.
            program = _package.load_pt2(io.BytesIO(content)).exported_programs["model"]
            model = program.module(check_guards=False)
    except Exception as error:
        reason = brief(str(error)) or type(error).__name__
        raise TargetError(f"torch cannot load {path}: {reason}") from error
    if program.example_inputs is None:
        raise TargetError(f"{path} was saved without example inputs, so there is no step to place")
    inputs, keywords = program.example_inputs
    try:
        inspect.signature(model.forward).bind(*inputs, **keywords)
        is_taken = tree_structure((tuple(inputs), dict(keywords))) == program.call_spec.in_spec
    except (TypeError, ValueError):
        is_taken = False
    if not is_taken:
        raise TargetError(f"{path} does not take the example inputs it was saved with")
    for module in model.modules():
        module.training = False  # train() and eval() refuse: the mode is part of the program
    return Workload(model, tuple(inputs), dict(keywords), training=False)


def _checked(path: Path) -> bytes:
    """Return the content of a file that is safe to load."""
    if not path.is_file():
        raise TargetError(missing_file(path))
    try:
        content = read_limited(path, available_memory_bytes())
    except OSError as error:
        raise TargetError(file_error_message(error)) from error
    except ValueError as error:
        raise TargetError(f"{path}: {error}") from error
    try:
        check_archive(content)
    except ValueError as error:
        raise TargetError(f"{path} {brief(str(error))}") from error
    return content
