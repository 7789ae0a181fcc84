"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or who comes after a crash, finds the old or the new one.

    A symbolic link stays one: what it points to is written. Text is written as UTF-8.

    Raises:
        OSError: it cannot be written, or is there and no regular file; carries the file's name.
    """
    target = path.resolve()
    # Unlike any other writer's, and short: names have a limit that a longer one might exceed.
    partial = target.with_name(f".{os.urandom(8).hex()}.partial")
    try:
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "Not a regular file")  # replacing it would remove a device
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
