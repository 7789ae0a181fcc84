"""Messages for files that are missing or cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

from graphs.names import suggestion


def missing_file(path: Path) -> str:
    """Return a message that names the file and, if there is one, a similar file in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no file {path}: there is no folder {folder}"
    if path.is_dir():
        return f"there is no file {path}: it is a folder"
    neighbours = sorted(near.name for near in folder.glob(f"*{path.suffix}") if near.is_file())
    return f"there is no file {path}" + suggestion(path.name, neighbours)


def why_not_read(error: OSError) -> str:
    """Return a message for an OSError, with the file if the error names one."""
    if error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror.lower()
    path = Path(os.fsdecode(error.filename))
    if isinstance(error, FileNotFoundError):
        return missing_file(path)
    return f"{path}: {error.strerror.lower()}"
