"""Faults of the user's, told in a sentence and with the right exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from placer.missing_file import why_not_read

JOB_FAILED: Final = 1
BAD_USAGE: Final = 2


def fail(code: int, message: object) -> int:
    """Print a message to stderr; gives the exit code back."""
    told = why_not_read(message) if isinstance(message, OSError) else message
    print(f"placer: {told}", file=sys.stderr)
    return code


def why_not_written(path: Path, error: OSError) -> str:
    """The sentence for a file that could not be written after all."""
    reason = error.strerror.lower() if error.strerror else str(error)
    return f"{path} cannot be written: {reason}"


def why_not_outputs(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]
) -> str | None:
    """Why results cannot go to these files, None if they can.

    Args:
        outputs: {option: file to be written, None where it was not given}.
        inputs: the same of files that are read: no result may replace one.
    """
    taken = {_real(path): name for name, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        if (why := _why_not_writable(path)) is not None:
            return why
        other = taken.setdefault(_real(path), option)
        if other != option:
            return f"{option} and {other} are the same file, {path}: give each its own"
    return None


def _why_not_writable(path: Path) -> str | None:
    """Why a file cannot be written, None if it can; nothing is left behind."""
    # A result is renamed into its place: the folder must be writable, and what is there goes.
    target = _real(path)
    folder = target.parent
    probe = folder / f".{os.urandom(8).hex()}.partial"
    try:
        if not folder.is_dir():
            return f"{path} cannot be written: there is no folder {folder}"
        if target.is_dir():
            return f"{path} cannot be written: it is a folder"
        if target.exists() and not target.is_file():
            return f"{path} cannot be written: it is no regular file, and must not be replaced"
        if target.exists() and not os.access(target, os.W_OK):
            return f"{path} cannot be written: permission denied"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return why_not_written(path, error)
    return None


def _real(path: Path) -> Path:
    """The file that a path leads to; of links in a circle, the path itself."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path
