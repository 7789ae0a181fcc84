"""Frozen dataclasses from the tables of a TOML file, and the differences between two of them.

The fields define what such a file may contain::

    seeds: Annotated[int, Within(1, 1000)] = 5
    layers: Annotated[tuple[Annotated[int, Within(1, 4096)], ...], Items(0, 8)] = (16,)
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from graphs.strict_json import array, fields, inside, number, text, whole, within

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Within:
    """The range of a number, both ends included."""

    low: float
    high: float

    def check(self, value: Any, where: str) -> None:
        """Raise ValueError if a value is out of range."""
        within(value, self.low, self.high, where)


@dataclass(frozen=True, slots=True)
class Items:
    """The allowed number of items of a list."""

    low: int
    high: int

    def check(self, value: Any, where: str) -> None:
        """Raise ValueError if there are more or fewer."""
        within(len(value), self.low, self.high, f"the number of items of {where}")


def record(kind: type[Record], value: object, where: str = "") -> Record:
    """Create a dataclass from a table: keys are fields, missing ones have their defaults."""
    members = dataclasses.fields(kind)  # type: ignore[arg-type]  # the caller gives a dataclass
    missing = dataclasses.MISSING
    required = [f.name for f in members if f.default is missing and f.default_factory is missing]
    items = fields(value, where, frozenset(f.name for f in members), required)
    hints = _hints(kind)
    typed = {key: _typed(hints[key], item, inside(where, key)) for key, item in items.items()}
    try:
        return kind(**typed)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def check_ranges(values: Any) -> None:
    """Check every field of a dataclass against its annotation."""
    for name, annotation in _hints(type(values)).items():
        _check(annotation, getattr(values, name), name)


def _check(annotation: Any, value: Any, where: str) -> None:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        _check(arguments[0], value, where)
        for limit in arguments[1:]:
            limit.check(value, where)
    elif origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True)):
            _check(kind, item, f"{where}[{i}]")
    elif origin in (Union, types.UnionType):
        for kind in arguments:
            numeric = get_origin(kind) is Annotated and get_args(kind)[0] in (int, float)
            if isinstance(value, int | float) == numeric and value is not None:
                _check(kind, value, where)


def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def plain(value: Any) -> dict[str, Any]:
    """Return a dataclass in the form of JSON; the inverse of :func:`record`."""
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value)))
    return data


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Return a sentence for every key of JSON data whose value differs, by its path."""
    if isinstance(before, dict) and isinstance(now, dict):
        parts = [
            (before.get(key), now.get(key), inside(where, key))
            for key in dict.fromkeys([*before, *now])
        ]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = [
            (old, new, f"{where}[{i}]")
            for i, (old, new) in enumerate(zip(before, now, strict=True))
        ]
    else:
        same = before == now
        return [] if same else [f"{where} was {json.dumps(before)} and is {json.dumps(now)} now"]
    return [line for part in parts for line in differences(*part)]


def _typed(annotation: Any, value: object, where: str) -> object:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        typed = _typed(arguments[0], value, where)
        for limit in arguments[1:]:
            limit.check(typed, where)
        return typed
    if origin in (Union, types.UnionType):
        return _only(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(repr, arguments))
            raise ValueError(f"{where} is {reprlib.repr(value)}, not one of {choices}")
        return value
    if origin is tuple:
        return _items(arguments, value, where)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return record(annotation, value, where)
    if annotation is float:
        real = number(value, where)
        if not math.isfinite(real):
            raise ValueError(f"{where} is {real}, not a finite number")
        return real
    return {int: whole, str: text}[annotation](value, where)


def _only(arguments: tuple[Any, ...], value: object, where: str) -> object:
    """Return a value of a Union type, of the first member that accepts it."""
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    if value is None and len(kinds) < len(arguments):  # null in JSON; TOML omits the key
        return None
    faults = []
    for kind in kinds:
        try:
            return _typed(kind, value, where)
        except ValueError as fault:
            faults.append(fault)
    raise faults[0 if isinstance(value, int | float) else -1]


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
