"""Progress, remarks and the duration of a command, on stderr; nothing with ``--quiet``.

The duration of an optimization is estimated before it and broken down after it. Errors are always
printed, see :mod:`placer.cli.failures`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TextIO

from envs.hardware.cache_folder import CacheWarning

if TYPE_CHECKING:
    from placer.progress import Progress
    from placer.search.request import Budget


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
    from placer.progress import Silent, progress_for

    return nullcontext(Silent()) if args.quiet else progress_for(sys.stderr.isatty())


PREPARING_S: Final = 20.0
"""Calibrating two cores takes 14 s, the ops of a small model 3 s; both are cached afterwards."""
RUNNING_S: Final = 15.0
"""Eight candidates at 1.5 s, see :func:`envs.core_runtime.rounds_for`, and the start of workers."""
SMALLEST: Final = 0.02
"""Share of the total time below which a stage is not listed separately."""


def duration(seconds: float) -> str:
    """Format a duration in seconds, from 90 s in minutes, from 90 min in hours.

    >>> duration(20.0), duration(600.0), duration(86400.0)
    ('20 s', '10 min', '24 h')
    """
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.4g} h"


def foretold(budget: Budget, *, is_model: bool, is_run: bool) -> str:
    """Return a sentence that estimates the duration; for a graph file it is the search alone."""
    known = budget.seconds or 0.0
    if not is_model:
        told = (
            f"about {duration(known)}, the search" if known else f"as long as the search, {budget}"
        )
        return f"This takes {told}."
    before = f"extracting and measuring up to {duration(PREPARING_S)}, less of what is known"
    after = f"running the best {duration(RUNNING_S)}, more where a step takes longer than 0.2 s"
    rest = [before, after] if is_run else [before]
    total = duration(known + PREPARING_S + (RUNNING_S if is_run else 0.0))
    told = (
        f"{total} in all on a quiet machine: search {duration(known)}; "
        if known
        else f"{total} on a quiet machine and the search, {budget}: "
    )
    return f"This takes about {told}{'; '.join(rest)}."


def taken(total_s: float, stages_s: Mapping[str, float]) -> str:
    """Return the total duration and its breakdown by stage; short stages are summed."""
    long_s = {what: part_s for what, part_s in stages_s.items() if part_s >= SMALLEST * total_s}
    parts = [f"{_named(what)} {duration(part_s)}" for what, part_s in long_s.items()]
    rest_s = max(total_s - sum(long_s.values()), 0.0)
    return f"took {duration(total_s)}: {', '.join([*parts, f'the rest {duration(rest_s)}'])}"


def _named(stage: str) -> str:
    title = stage.partition(" (")[0]
    return title[:1].lower() + title[1:]
