"""Tables of results, for terminals and for Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from graphs.files import write_whole

BEGIN: Final = "<!-- benchmarks: begin -->"
END: Final = "<!-- benchmarks: end -->"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title; every row has a cell for each column."""

    title: str
    note: str  # what the numbers are
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown, title and note above it."""
        lines = [
            f"| {' | '.join(self.columns)} |",
            f"|{'|'.join(['---', *['--:'] * (len(self.columns) - 1)])}|",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return f"**{self.title}**: {self.note}\n\n" + "\n".join(lines) + "\n"

    def text(self) -> str:
        """Return the table with aligned columns."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = [
            [cell.rjust(width) if k else cell.ljust(width) for k, (cell, width) in enumerate(pairs)]
            for pairs in (zip(line, widths, strict=True) for line in lines)
        ]
        return "\n".join([f"{self.title}: {self.note}", *("  " + "  ".join(row) for row in cells)])


def merged(tables: Iterable[Table]) -> list[Table]:
    """Return the tables, those of one title joined into one."""
    found: dict[tuple[str, tuple[str, ...]], Table] = {}
    for table in tables:
        key = table.title, table.columns
        known = found.get(key)
        found[key] = table if known is None else replace(known, rows=known.rows + table.rows)
    return list(found.values())


def spread(values: Iterable[float], form: str) -> str:
    """Return the median, with the range in brackets if there is one: ``0.79 (0.78-0.80)``."""
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    low, high = f"{ordered[0]:{form}}", f"{ordered[-1]:{form}}"
    return f"{middle:{form}}" if low == high else f"{middle:{form}} ({low}-{high})"


def write_tables(page: Path, markdown: str) -> None:
    """Write tables between the markers of a Markdown page, or as a new page.

    Raises:
        ValueError: the page exists but has no markers.
    """
    before, after = around_tables(page)
    write_whole(page, f"{before}{BEGIN}\n{markdown}{END}{after}")


def around_tables(page: Path) -> tuple[str, str]:
    """Return the text of a Markdown page before and after its tables.

    Raises:
        ValueError: the page exists but has no markers.
    """
    text = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END} for the tables to go between")
    return before, after
