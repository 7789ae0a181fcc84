"""Output of a command: its result on stdout, progress and remarks on stderr, and its files."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envs.hardware.cache_folder import CacheWarning
from graphs.files import partial_name, written_file
from placer.cli.errors import JobError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from placer.progress import Progress

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEAST_BYTES: Final = 4096
"""Assumed size of any result: one block of a file system, which a full disk lacks."""


def print_result(
    args: argparse.Namespace,
    data: Callable[[], Any],
    table: Callable[[Console], None],
    line: object = "",
) -> None:
    """Print a result: with ``--json`` its data, with ``--quiet`` its line if any, else its table.

    The data must not contain infinite numbers.
    """
    if args.json:
        print(json.dumps(data(), allow_nan=False))
    elif args.quiet and str(line):
        print(line)
    else:
        from placer.report.console import stdout_console

        table(stdout_console())


def say(args: argparse.Namespace, text: object) -> None:
    """Print a remark to stderr, on a terminal without breaking words."""
    if args.quiet:
        return
    shown = str(text)
    if sys.stderr.isatty():
        shown = textwrap.fill(shown, shutil.get_terminal_size().columns, break_long_words=False)
    print(shown, file=sys.stderr)


def progress_of(args: argparse.Namespace) -> AbstractContextManager[Progress]:
    """Return the progress display of a command."""
    from placer.progress import progress_for

    return progress_for(None if args.quiet else sys.stderr)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings about the cache and devices as remarks, without Python's file and line."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        from envs.hardware.errors import DeviceWarning

        if issubclass(category, CacheWarning | DeviceWarning):
            print(f"placer: {message}", file=sys.stderr)
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in errors of writing it."""
    try:
        yield
    except OSError as error:
        raise JobError(write_error(path, error)) from error


def write_error(path: Path, error: OSError) -> str:
    """Return the message for a file that could not be written."""
    reason = error.strerror.lower() if error.strerror else str(error)
    return f"{path} cannot be written: {reason}"


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, Path | None],
    least_bytes: int = LEAST_BYTES,
) -> None:
    """Check before any work that ``outputs`` {option: file} can be written and replace no input."""
    taken = {_real(path): name for name, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            _check_writable(path, least_bytes)
        except OSError as error:
            kind = JobError if error.errno in FULL else UsageError
            raise kind(write_error(path, error)) from error
        other = taken.setdefault(_real(path), option)
        if other != option:
            raise UsageError(
                f"{option} and {other} are the same file, {path}: each needs its own file"
            )


def _check_writable(path: Path, least_bytes: int) -> None:
    # Results are renamed into place: the folder must be writable, an old file is replaced.
    target = written_file(path)
    folder = target.parent
    if not folder.is_dir():
        raise OSError(f"there is no folder {folder}")
    if target.is_dir():
        raise OSError("it is a folder")
    if target.exists() and not target.is_file():
        raise OSError("it is no regular file, and must not be replaced")
    if target.exists() and not os.access(target, os.W_OK):
        raise OSError("permission denied")
    probe = folder / partial_name(target.name)
    with probe.open("xb") as file:
        probe.unlink()  # now, so that nothing is left if this process is killed
        try:
            os.posix_fallocate(file.fileno(), 0, least_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system has no such
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
