"""JSON that others write too, read strictly: a fault is refused with its place in the file.

``where`` is always the path of a value within its file, such as ``nodes[3].cost_s``; "" is the
file itself.
"""

from __future__ import annotations

import difflib
import gc
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from graphs.whole_file import read_limited

Parsed = TypeVar("Parsed")
MUCH: Final = 1 << 20
"""Characters that take long to parse; where they are junk, it is better told before."""
LARGEST_FILE_BYTES: Final = 1 << 29
"""About four million ops; what is larger was hardly meant as a graph or a placement."""


class _Repeating(dict[str, Any]):
    """A JSON object with a key given twice, kept until its path is known."""

    repeated: str


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    repeating = _Repeating(made)
    counts = Counter(key for key, _ in pairs)
    repeating.repeated = next(key for key, count in counts.items() if count > 1)
    return repeating


def load_checked(path: Path, parse: Callable[[object], Parsed]) -> Parsed:
    """What ``parse`` makes of the content of a JSON file.

    Raises:
        ValueError: it is not JSON, is larger than 0.5 GB, or ``parse`` refuses it; the message
            starts with the file.
        OSError: it cannot be read.
    """
    try:
        text = read_limited(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
        if not text or text.isspace():
            raise ValueError("the file is empty")
        if len(text) > MUCH and not re.match(r"\s*\{", text):
            raise ValueError("the file is no JSON object")
        with _without_collecting():
            return parse(json.loads(text, object_pairs_hook=_object_of))
    except RecursionError:
        raise ValueError(f"{path}: the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    except ValueError as error:
        shown = str(error)
        if "integer string conversion" in shown:
            shown = "a number has thousands of digits"
        raise ValueError(f"{path}: {shown}") from error


def fields(
    value: object, where: str, known: frozenset[str], required: Iterable[str]
) -> dict[str, Any]:
    """An object whose keys are among ``known``, the ``required`` ones present.

    Raises:
        ValueError: it is not.
    """
    found = table(value, where)
    if not known.issuperset(found):
        key = next(key for key in found if key not in known)
        near = difflib.get_close_matches(key, sorted(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown key {inside(where, key)}{hint}")
    if missing := [key for key in required if key not in found]:
        raise ValueError(f"{where or 'the file'} lacks {', '.join(missing)}")
    return found


def table(value: object, where: str) -> dict[str, Any]:
    """An object with any keys, none of them twice.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the file'} is {reprlib.repr(value)}, not an object")
    if isinstance(value, _Repeating):
        raise ValueError(f"{inside(where, value.repeated)} is given twice")
    return value


def array(value: object, where: str) -> list[object]:
    """A list.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a list")
    return value


def text(value: object, where: str) -> str:
    """A string.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a string")
    return value


def number(value: object, where: str) -> float:
    """A number, perhaps not a finite one.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where} is too large a number") from None


def whole(value: object, where: str) -> int:
    """A whole number; 3.0 is one too.

    Raises:
        ValueError: it is not.
    """
    given = number(value, where)
    if not (math.isfinite(given) and given == int(given)):
        raise ValueError(f"{where} is {given}, not a whole number")
    return value if isinstance(value, int) else int(given)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Without the garbage collector, which would look at a million live objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def inside(where: str, key: str) -> str:
    """The path of a key of the object at ``where``."""
    return f"{where}.{key[:80]}" if where else key[:80]
