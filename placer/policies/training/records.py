"""Frozen dataclasses from the tables of a TOML file, and what differs between two of them."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from graphs.strict_json import array, fields, inside, number, text, whole

Record = TypeVar("Record")


def record(kind: type[Record], value: object, where: str = "") -> Record:
    """A dataclass from a table: keys are its fields, what is left out has its default.

    Raises:
        ValueError: a key is unknown or missing, or a value of another type or out of range; says
            the path of the key.
    """
    own = dataclasses.fields(kind)  # type: ignore[arg-type]  # the caller gives a dataclass
    missing = dataclasses.MISSING
    required = [f.name for f in own if f.default is missing and f.default_factory is missing]
    given = fields(value, where, frozenset(f.name for f in own), required)
    hints = get_type_hints(kind)
    typed = {key: _typed(hints[key], item, inside(where, key)) for key, item in given.items()}
    try:
        return kind(**typed)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON holds it; :func:`record` reads it back."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value)))
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """Sentences on every key whose value is another now, by its path."""
    return list(_differences(before, now, where))


def _differences(before: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(key), now.get(key), inside(where, key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{where}[{i}]")
    elif before != now:
        yield f"{where} was {json.dumps(before)} and is {json.dumps(now)} now"


def _typed(annotation: Any, value: object, where: str) -> object:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _only(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(repr, arguments))
            raise ValueError(f"{where} is {value!r}, not one of {choices}")
        return value
    if origin is tuple:
        return _items(arguments, value, where)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return record(annotation, value, where)
    if annotation is float:
        given = number(value, where)
        if not math.isfinite(given):
            raise ValueError(f"{where} is {given}, not a finite number")
        return given
    return {int: whole, str: text}[annotation](value, where)


def _only(arguments: tuple[Any, ...], value: object, where: str) -> object:
    """A value that may be left out, of several types the first that takes it."""
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    if value is None and len(kinds) < len(arguments):  # JSON says so, TOML leaves the key out
        return None
    for kind in kinds[:-1]:
        try:
            return _typed(kind, value, where)
        except ValueError:
            continue
    return _typed(kinds[-1], value, where)


def _items(arguments: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    items = array(value, where)
    if arguments[-1] is ...:
        arguments = (arguments[0],) * len(items)
    if len(items) != len(arguments):
        raise ValueError(f"{where} has {len(items)} items, not {len(arguments)}")
    return tuple(
        _typed(kind, item, f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(arguments, items, strict=True))
    )
