"""The console that tables are printed to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH_ELSEWHERE: Final = 110
"""Width in columns if the output is not a terminal."""


def stdout_console() -> Console:
    """Return a console for stdout, as wide as the terminal, that prints markup in names as text."""
    width = None if sys.stdout.isatty() else WIDTH_ELSEWHERE
    return Console(width=width, markup=False, highlight=False)


def print_rows(console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows as a table, nothing without rows; columns of numbers are right-aligned."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD)
    cells = [[str(cell) for cell in row] for row in rows]
    for column, values in zip(columns, zip(*cells, strict=True), strict=True):
        is_number = all(value[:1].isdigit() for value in values if value)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)
