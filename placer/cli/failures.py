"""Error messages of one line, exit codes, checks of output files, and errors of standard output."""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from graphs.files import file_error_message, partial_name, written_file
from graphs.strict_json import brief

JOB_FAILED: Final = 1
BAD_USAGE: Final = 2
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEAST_BYTES: Final = 4096
"""Assumed size of any result: one block of a file system, which a full disk lacks."""

REMEDIES: Final = {
    "modules": "--extractor modules",
    "fp32": "--dtype fp32",
    "no costs": "placer extract --costs none",
}
"""{remedy of an ExtractionError: the option that applies it}."""


def fail(code: int, message: object) -> int:
    """Print a message to stderr, shortened to one line, and return the exit code."""
    told = message
    if isinstance(message, OSError):
        told = why_no_memory(message) or file_error_message(message)
    option = REMEDIES.get(getattr(message, "remedy", None) or "")
    advice = f" Try {option}." if option else ""
    print(f"placer: {brief(str(told))}{advice}", file=sys.stderr)
    return code


def why_not_written(path: Path, error: OSError) -> str:
    """Return the message for a file that could not be written."""
    reason = error.strerror.lower() if error.strerror else str(error)
    return f"{path} cannot be written: {reason}"


def why_no_memory(error: BaseException) -> str | None:
    """Return the message for too little memory, None if an error has another cause.

    If the address space is limited, imports fail in many ways.
    """
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        return (
            f"there is too little memory: this process may have {limit_bytes / 1e9:.1f} GB of "
            "addresses (ulimit -v), and the libraries alone need more than 1 GB"
        )
    is_certain = isinstance(error, MemoryError | OSError)
    return "there is too little memory" if is_certain else None


def why_not_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, Path | None],
    least_bytes: int = LEAST_BYTES,
) -> str | None:
    """Return why results cannot be written to these files, None if they can.

    Args:
        outputs: {option: file to write, None if not given}.
        inputs: {option: file to read}; no result may replace one.
        least_bytes: smallest size of each output.

    Raises:
        OSError: a disk is full; its text is the message.
    """
    taken = {_real(path): name for name, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        if (why := _why_not_writable(path, least_bytes)) is not None:
            return why
        other = taken.setdefault(_real(path), option)
        if other != option:
            return f"{option} and {other} are the same file, {path}: give each its own"
    return None


def _why_not_writable(path: Path, least_bytes: int) -> str | None:
    """Return why a file cannot be written, None if it can; nothing is left behind."""
    # Results are renamed into place: the folder must be writable, an old file is replaced.
    try:
        target = written_file(path)
        folder = target.parent
        probe = folder / partial_name(target.name)
        if not folder.is_dir():
            return f"{path} cannot be written: there is no folder {folder}"
        if target.is_dir():
            return f"{path} cannot be written: it is a folder"
        if target.exists() and not target.is_file():
            return f"{path} cannot be written: it is no regular file, and must not be replaced"
        if target.exists() and not os.access(target, os.W_OK):
            return f"{path} cannot be written: permission denied"
        with probe.open("xb") as file:
            probe.unlink()  # now, so that nothing is left if this process is killed
            _reserve(file.fileno(), least_bytes)
    except OSError as error:
        why = why_not_written(path, error)
        if error.errno in FULL:
            raise OSError(why) from error
        return why
    return None


def _reserve(file: int, size: int) -> None:
    """Allocate space on the disk.

    Raises:
        OSError: there is too little space.
    """
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not supported by the file system
            raise


def _real(path: Path) -> Path:
    """Return the resolved path; the path itself if its links form a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


class StandardOutput(io.TextIOWrapper):
    """Standard output that names itself in its first error and discards everything after it."""

    def write(self, text: str) -> int:
        """Write text, like any file."""
        with self._named():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer."""
        with self._named():
            super().flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a device
                os.dup2(nothing.fileno(), self.fileno())
            raise OSError(error.errno, error.strerror, "standard output") from None
