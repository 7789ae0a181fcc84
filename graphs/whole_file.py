"""Files that are read and written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def read_limited(path: Path, largest_bytes: int) -> bytes:
    """The content of a file, or of a pipe, that may not be larger.

    Raises:
        ValueError: it is larger; of a file nothing has been read then.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= largest_bytes:  # 0 for a pipe, whatever comes out of it
            content = file.read(largest_bytes + 1)
            size = max(size, len(content))
    if size > largest_bytes:
        raise ValueError(
            f"{_readable(size)} is more than such a file may have ({_readable(largest_bytes)})"
        )
    return content


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


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
