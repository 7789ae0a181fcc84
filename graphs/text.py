"""Texts for users: checked and escaped before they are shown, and suggestions for wrong names."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def check_printable(value: object, where: str = "") -> None:
    """Check that no text in nested dicts and lists, keys included, has control characters.

    Such characters move the cursor of a terminal, clear it, or reverse the reading direction.
    """
    if not _is_printable(value):
        place, text = _unprintable(value, where)
        shown = ascii(text if len(text) <= 80 else f"{text[:77]}...")
        raise ValueError(f"{place or 'the text'} is {shown}, which cannot be printed")


def escaped(text: str) -> str:
    r"""Return a text with control characters, except newline and tab, escaped as in ``\x1b``.

    >>> escaped("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _code(c) for c in text)


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's text, or its type: CUDA and others add advice.

    >>> first_line(RuntimeError("CUDA error: unknown\nCompile with ...")), first_line(KeyError())
    ('CUDA error: unknown', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a small HTML table for notebooks, with all texts escaped."""

    def row(tag: str, cells: Iterable[object]) -> str:
        parts = (f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
        return f"<tr>{''.join(parts)}</tr>"

    lines = [row("th", columns), *(row("td", cells) for cells in rows)]
    return f"<table><caption>{html.escape(caption)}</caption>{''.join(lines)}</table>"


def _is_printable(value: object) -> bool:
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, dict):
        return all(map(_is_printable, value)) and all(map(_is_printable, value.values()))
    return not isinstance(value, list) or all(map(_is_printable, value))


def _unprintable(value: object, where: str) -> tuple[str, str]:
    """Return the place of the first text that cannot be printed, and the text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not _is_printable(key):
                return f"a key of {where or 'the file'}", key
            if not _is_printable(item):
                return _unprintable(item, f"{where}.{key}" if where else str(key))
    if isinstance(value, list):
        number = next(i for i, item in enumerate(value) if not _is_printable(item))
        return _unprintable(value[number], f"{where}[{number}]")
    return where, str(value)


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode()


def suggestion(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a hint to append to a message: the most similar known name, or "" if none is similar.

    >>> suggestion("cuda0", ["cpu", "cuda:0"])
    '; did you mean cuda:0?'
    """
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
