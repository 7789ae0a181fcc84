"""Faults of the user's, told in a sentence and with the right exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

JOB_FAILED: Final = 1
BAD_USAGE: Final = 2


def fail(code: int, message: object) -> int:
    """Print a message to stderr; gives the exit code back."""
    print(f"placer: {message}", file=sys.stderr)
    return code


def why_not_writable(path: Path) -> str | None:
    """Why a file cannot be written, None if it can; nothing is left behind."""
    folder = path.parent
    if not folder.is_dir():
        return f"{path} cannot be written: there is no folder {folder}"
    if path.is_dir():
        return f"{path} cannot be written: it is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return f"{path} cannot be written: permission denied"
    probe = folder / f".{path.name}.{os.getpid()}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None
