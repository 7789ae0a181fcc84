"""Progress and remarks of a command, on stderr; nothing with ``--quiet``.

Errors are always printed, see :mod:`placer.cli.failures`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO

from envs.cache_folder import CacheWarning

if TYPE_CHECKING:
    from placer.report.progress import Progress


def say(args: argparse.Namespace, text: object) -> None:
    """Print a remark."""
    if not args.quiet:
        print(text, file=sys.stderr)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings about the cache as remarks, without Python's file and line."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, CacheWarning):
            print(f"placer: {message}", file=sys.stderr)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def progress_of(args: argparse.Namespace) -> AbstractContextManager[Progress]:
    """Return the progress display of a command."""
    from placer.report.progress import Silent, progress_for

    return nullcontext(Silent()) if args.quiet else progress_for(sys.stderr.isatty())
