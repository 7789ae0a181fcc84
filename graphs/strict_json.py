"""Strict reading of JSON and TOML that other tools write too: a ValueError names the faulty value.

``where`` is always the path of a value within its file, such as ``nodes[3].cost_s``; "" is the file
itself.
"""

from __future__ import annotations

import gc
import json
import math
import re
import reprlib
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Final, TypeVar

from graphs.files import read_limited
from graphs.text import check_printable, escaped, suggestion

Parsed = TypeVar("Parsed")
MUCH: Final = 1 << 20
"""Texts with more characters than this are checked for a leading brace before they are parsed."""
LARGEST_FILE_BYTES: Final = 1 << 29
"""About four million ops; a larger file is hardly meant as a graph or a placement."""
LARGEST_TOML_BYTES: Final = 10**6
MOST_PARTS: Final = 64
LONGEST_WORD: Final = 200
LONGEST_MESSAGE: Final = 1500
_BETWEEN: Final = str.maketrans("", "", "\n\r\t")
"""Control characters that JSON allows between strings but not within them."""
_LONG_WORD: Final = re.compile(
    rf"(?<![^\s/])[^\s/]{{{LONGEST_WORD + 1},}}+(?=\s|$)"  # a path stays whole
)
_LONG_KEY: Final = re.compile(
    rf"""(?<![\w"'.-])(?:[\w"'-]{{1,80}}[ \t]*\.[ \t]*){{{MOST_PARTS}}}"""
)


class _Repeating(dict[str, Any]):
    """A JSON object with a repeated key, kept until its path is known."""

    repeated: str


def load_checked(path: Path, parse: Callable[[object], Parsed]) -> Parsed:
    """Return the result of ``parse`` on the content of a JSON file."""
    with _errors_naming(path):
        text = read_limited(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
        if not text or text.isspace():
            raise ValueError("the file is empty")
        if len(text) > MUCH and not re.match(r"\s*\{", text):
            raise ValueError("the file is no JSON object")
        with _without_collecting():
            return parse_json(text, parse)


def load_toml(path: Path, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """Return the result of ``parse`` on the content of a TOML file."""
    with _errors_naming(path):
        text = read_limited(path, LARGEST_TOML_BYTES).decode()
        if _LONG_KEY.search(text):  # tomllib is quadratic in the parts
            raise ValueError(f"more than {MOST_PARTS} names are joined by dots")
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"not TOML: {error}") from error
        check_printable(content)
        return parse(content)


def parse_json(text: str, parse: Callable[[object], Parsed], *, printable: bool = True) -> Parsed:
    """Return the result of ``parse`` on JSON whose objects have no repeated keys.

    With ``printable`` False its texts may have any characters, since they are never shown.
    """
    repeating: list[_Repeating] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeating.append(table := _Repeating(made))
        counts = Counter(key for key, _ in pairs)
        table.repeated = next(key for key, count in counts.items() if count > 1)
        return table

    try:
        content = json.loads(text, object_pairs_hook=object_of)
        if printable and not _is_plain(text):
            check_printable(content)
        made = parse(content)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if repeating:  # in objects that parse did not look at
        raise ValueError(f"{repeating[0].repeated!r} is given twice in one object")
    return made


def _is_plain(text: str) -> bool:
    """Return whether the JSON text is free of escapes and control characters (a quick check)."""
    return "\\" not in text and text.translate(_BETWEEN).isprintable()


def brief(message: str) -> str:
    """Return a message as one line of readable length, without control characters.

    The middle of long words and messages is cut out.

    >>> len(brief(f"op {500 * 'a'} is there already"))
    206
    """
    line = escaped(" ".join(part for line in message.splitlines() if (part := line.strip())))
    line = _LONG_WORD.sub(lambda word: _shortened(word[0], LONGEST_WORD), line)
    return _shortened(line, LONGEST_MESSAGE)


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]}...{text[-(longest // 4) :]}"


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Prefix the message of errors raised inside with the file."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 (byte {error.start})") from error
    except ValueError as error:
        shown = str(error)
        if "integer string conversion" in shown:
            shown = "a number has thousands of digits"
        raise ValueError(f"{path}: {brief(shown)}") from error


def of_format(
    value: object, file_format: str, known: frozenset[str], required: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the content of a file of a format, ``name/version``, like :func:`fields`.

    The format is checked first, since the keys follow from it.
    """
    content = table(value, "")
    if "format" not in content:
        raise ValueError(f"the file lacks format, which is {file_format!r} in such a file")
    found = content["format"]
    if found != file_format:
        same = isinstance(found, str) and found.partition("/")[0] == file_format.partition("/")[0]
        reads = "this version reads" if same else "but this file has to be"
        raise ValueError(f"format is {reprlib.repr(found)}, {reads} {file_format!r}")
    return fields(content, "", known, required)


def fields(
    value: object, where: str, known: frozenset[str], required: Iterable[str]
) -> dict[str, Any]:
    """Return an object whose keys are among ``known``, the ``required`` ones present."""
    content = table(value, where)
    if not known.issuperset(content):
        key = next(key for key in content if key not in known)
        raise ValueError(f"unknown key {inside(where, key)}{suggestion(key, sorted(known))}")
    if missing := [key for key in required if key not in content]:
        raise ValueError(f"{where or 'the file'} lacks {', '.join(missing)}")
    return content


def table(value: object, where: str) -> dict[str, Any]:
    """Return an object with any keys, none of them repeated."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the file'} is {reprlib.repr(value)}, not an object")
    if isinstance(value, _Repeating):
        raise ValueError(f"{inside(where, value.repeated)} is given twice")
    return value


def array(value: object, where: str) -> list[object]:
    """Return a list."""
    if not isinstance(value, list):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a list")
    return value


def text(value: object, where: str) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a string")
    return value


def boolean(value: object, where: str) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {reprlib.repr(value)}, neither true nor false")
    return value


def number(value: object, where: str) -> float:
    """Return a number as float, possibly not finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where} is too large a number") from None


def whole(value: object, where: str) -> int:
    """Return a whole number; 3.0 is one too."""
    size = number(value, where)
    if not (math.isfinite(size) and size == int(size)):
        raise ValueError(f"{where} is {size}, not a whole number")
    return value if isinstance(value, int) else int(size)


def check_whole(value: object, where: str) -> None:
    """Check that an argument is a whole number, of Python or numpy."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a whole number")


def within(value: float, low: float, high: float, where: str) -> None:
    """Check that a number is in a range, both ends included."""
    if not low <= value <= high:
        ends = [end if isinstance(end, int) else f"{end:g}" for end in (low, high)]
        raise ValueError(f"{where} is {reprlib.repr(value)}, not within {ends[0]} .. {ends[1]}")


def one_of(value: str, choices: Collection[str], where: str) -> None:
    """Check that a word is one of some."""
    if value not in choices:
        hint = suggestion(value, choices)
        raise ValueError(f"{where} is {reprlib.repr(value)}, not one of {', '.join(choices)}{hint}")


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable the garbage collector, which would scan a million live objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def inside(where: str, key: str) -> str:
    """Return the path of a key of the object at ``where``."""
    return f"{where}.{key[:80]}" if where else key[:80]
