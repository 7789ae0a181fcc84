"""JSON that others write too, read strictly: a fault is refused with its place in the file.

``where`` is always the path of a value within its file, such as ``nodes[3].cost_s``; "" is the
file itself.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

Parsed = TypeVar("Parsed")
LARGEST_FILE_BYTES: Final = 1 << 29
"""About four million ops; what is larger was hardly meant as a graph or a placement."""


class _Object(dict[str, Any]):
    """A JSON object that remembers a key given twice, until its path is known."""

    repeated: str | None = None

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Object:
        made = cls(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    made.repeated = key
                    break
                seen.add(key)
        return made


def load_checked(path: Path, parse: Callable[[object], Parsed]) -> Parsed:
    """What ``parse`` makes of the content of a JSON file.

    Raises:
        ValueError: it is not JSON, is larger than 0.5 GB, or ``parse`` refuses it; the message
            starts with the file.
        OSError: it cannot be read.
    """
    try:
        text = _bytes_of(path).decode("utf-8-sig")
        if not text.strip():
            raise ValueError("the file is empty")
        return parse(json.loads(text, object_pairs_hook=_Object.of))
    except RecursionError:
        raise ValueError(f"{path}: the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def fields(
    value: object, where: str, known: frozenset[str], required: Iterable[str]
) -> dict[str, Any]:
    """An object whose keys are among ``known``, the ``required`` ones present.

    Raises:
        ValueError: it is not.
    """
    found = table(value, where)
    for key in found:
        if key not in known:
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
    if isinstance(value, _Object) and value.repeated is not None:
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


def inside(where: str, key: str) -> str:
    """The path of a key of the object at ``where``."""
    return f"{where}.{key[:80]}" if where else key[:80]


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= LARGEST_FILE_BYTES:  # 0 for a pipe, whatever comes out of it
            content = file.read(LARGEST_FILE_BYTES + 1)
            size = max(size, len(content))
    if size > LARGEST_FILE_BYTES:
        raise ValueError(f"{size / 1e9:.1f} GB is more than such a file may have (0.5 GB)")
    return content
