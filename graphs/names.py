"""Suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a hint to append to a message: the most similar known name, or "" if none is similar.

    >>> suggestion("cuda0", ["cpu", "cuda:0"])
    '; did you mean cuda:0?'
    """
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
