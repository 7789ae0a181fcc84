"""What a command says besides its result: progress and remarks, on stderr, nothing if ``--quiet``.

Errors are no talk; :mod:`placer.cli.failures` prints them always.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placer.report.progress import Progress


def say(args: argparse.Namespace, text: object) -> None:
    """Print a remark."""
    if not args.quiet:
        print(text, file=sys.stderr)


def progress_of(args: argparse.Namespace) -> AbstractContextManager[Progress]:
    """What shows how far the job is."""
    from placer.report.progress import Silent, progress_for

    return nullcontext(Silent()) if args.quiet else progress_for(sys.stderr.isatty())
