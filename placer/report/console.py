"""The console that tables are printed to."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

WIDTH_ELSEWHERE: Final = 110
"""Columns where the output is no terminal: a log has no width."""


def stdout_console() -> Console:
    """Standard output, as wide as the terminal; names from files are text, whatever they hold."""
    width = None if sys.stdout.isatty() else WIDTH_ELSEWHERE
    return Console(width=width, markup=False, highlight=False)
