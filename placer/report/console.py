"""The console that tables are printed to."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

WIDTH_ELSEWHERE: Final = 110
"""Width in columns if the output is not a terminal."""


def stdout_console() -> Console:
    """Return a console for stdout, as wide as the terminal, that prints markup in names as text."""
    width = None if sys.stdout.isatty() else WIDTH_ELSEWHERE
    return Console(width=width, markup=False, highlight=False)
