"""Errors of exports, and the renaming of the devices of a placement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from envs.runtime import is_of_torch


class ExportError(ValueError):
    """The format cannot express the placement; the message says what prevents it."""


class RenamingError(ExportError):
    """Device names are invalid or missing; the message says how to give them."""


def check_renamed(renamed: Mapping[str, str], placed_on: Sequence[str]) -> None:
    """Check that the renamed devices belong to the placement and the new ones can exist.

    If all devices of the placement are renamed, additional names are accepted.
    """
    unknown = [name for name in renamed if name not in placed_on]
    if unknown and not set(placed_on) <= renamed.keys():
        raise RenamingError(
            f"{unknown[0]} cannot be renamed: the placement has {', '.join(placed_on)}, to be "
            f"renamed as in {_example(placed_on)}"
        )
    check_of_torch({name for name in renamed.values() if name not in placed_on}, placed_on)


def check_of_torch(devices: Collection[str], placed_on: Sequence[str]) -> None:
    """Check that torch has the devices, as they would be written."""
    if others := sorted(name for name in devices if not is_of_torch(name)):
        raise RenamingError(
            f"torch has no device {', '.join(others)}: rename the devices of the placement, "
            f"as in {_example(placed_on)}"
        )


def _example(placed_on: Sequence[str]) -> str:
    return ",".join(f"{name}=cuda:{d}" for d, name in enumerate(placed_on))
