"""Errors of exports, and the renaming of the devices of a placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from envs.hardware.core_sets import core_runs
from envs.hardware.discover import is_core
from envs.runtime import is_of_torch


class ExportError(ValueError):
    """The format cannot express the placement; the message says what prevents it."""


class RenamingError(ExportError):
    """Device names are invalid or missing; the message says how to give them."""


def renamed_devices(renamed: Mapping[str, str], placed_on: Sequence[str]) -> dict[str, str]:
    """Return ``renamed`` with all devices of the placement that it is to rename; check the names.

    A set of cores that is not renamed itself is written as its first core is: the answer of a
    search may be the unplaced model on all cores. If all devices of the placement are renamed,
    additional ones are accepted.
    """
    first_of = {
        name: f"core:{core_runs(name)[0][0]}"
        for name in placed_on
        if is_core(name) and name not in renamed
    }
    of_sets = {name: renamed[first] for name, first in first_of.items() if first in renamed}
    names = {**renamed, **of_sets}
    unknown = [name for name in renamed if name not in {*placed_on, *first_of.values()}]
    if unknown and not set(placed_on) <= names.keys():
        raise RenamingError(
            f"{unknown[0]} cannot be renamed: the placement has {', '.join(placed_on)}, to be "
            f"renamed as in {_example(placed_on)}"
        )
    check_of_torch({name for name in names.values() if name not in placed_on}, placed_on)
    written = Counter(names.get(name, name) for name in placed_on)
    if twice := next((name for name, count in written.items() if count > 1), None):
        raise RenamingError(f"two devices would be {twice}: give each a name of its own")
    return names


def check_of_torch(devices: Collection[str], placed_on: Sequence[str]) -> None:
    """Check that torch has the devices, as they would be written."""
    if others := sorted(name for name in devices if not is_of_torch(name)):
        raise RenamingError(
            f"torch has no device {', '.join(others)}: rename the devices of the placement, "
            f"as in {_example(placed_on)}"
        )


def check_main_device(name: str, renamed: Mapping[str, str], placed_on: Sequence[str]) -> None:
    """Check that the inputs of a model would be on a device of its placement or on the CPU."""
    check_of_torch([name], placed_on)
    written = dict.fromkeys((*(renamed.get(own, own) for own in placed_on), *renamed.values()))
    if name != "cpu" and name not in written:
        raise RenamingError(
            f"the main device would be {name}, but the placement is written on {', '.join(written)}"
        )


def _example(placed_on: Sequence[str]) -> str:
    return ",".join(f"{name}=cuda:{d}" for d, name in enumerate(placed_on))
