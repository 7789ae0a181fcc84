"""Tables of figures, for the terminal and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title; every row has a cell for each column."""

    title: str
    note: str  # what the figures are
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table as Markdown, title and note above it."""
        lines = [
            f"| {' | '.join(self.columns)} |",
            f"|{'|'.join(['---', *['--:'] * (len(self.columns) - 1)])}|",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return f"**{self.title}**: {self.note}\n\n" + "\n".join(lines) + "\n"

    def show(self, console: Console) -> None:
        """Print it to a terminal."""
        from rich import box
        from rich.table import Table as RichTable

        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for k, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if k else "left")
        for row in self.rows:
            shown.add_row(*row)
        console.print(f"{self.title}: {self.note}")
        console.print(shown)


def spread(values: list[float], form: str) -> str:
    """The median, and the range in brackets where there is one to see: ``0.79 (0.78-0.80)``."""
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    low, high = f"{ordered[0]:{form}}", f"{ordered[-1]:{form}}"
    return f"{middle:{form}}" if low == high else f"{middle:{form}} ({low}-{high})"
