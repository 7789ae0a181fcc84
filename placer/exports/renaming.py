"""Errors of exports, and the renaming of devices, as in ``--as core:0=cuda:0``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count

from envs.runtime import is_of_torch


class ExportError(ValueError):
    """The format cannot express the placement; the message says what prevents it."""


class RenamingError(ExportError):
    """Device names are invalid or missing; the message says how to give them."""


def check_renamed(renamed: Mapping[str, str], placed_on: Sequence[str]) -> None:
    """Check that the renamed devices belong to the placement and the new ones can exist.

    If all devices of the placement are renamed, additional names are accepted.

    Raises:
        RenamingError: the check fails.
    """
    unknown = [name for name in renamed if name not in placed_on]
    if unknown and not set(placed_on) <= renamed.keys():
        raise RenamingError(
            f"--as renames {unknown[0]}, but the placement has {', '.join(placed_on)}"
        )
    for name, target in renamed.items():
        if not is_of_torch(target) and target not in placed_on:
            raise RenamingError(
                f"--as {name}={target} names no device of torch: {as_option(renamed, placed_on)}"
            )


def check_main_device(name: str | None, devices: Collection[str]) -> None:
    """Check that torch has the main device.

    Raises:
        RenamingError: torch does not have it.
    """
    if name is not None and not is_of_torch(name):
        raise RenamingError(
            f"--main-device {name} is no device of torch: name one of {', '.join(sorted(devices))}"
        )


def unknown_devices(
    used: Collection[str], renamed: Mapping[str, str], placed_on: Sequence[str]
) -> str:
    """Return a message about used devices that torch lacks, "" if there are none.

    Args:
        used: the devices as they would be written.
        renamed: {device of the placement: device to write}.
        placed_on: all devices of the placement.
    """
    others = sorted(name for name in used if not is_of_torch(name))
    if not others:
        return ""
    are = "is no device" if len(others) == 1 else "are no devices"
    return f"{', '.join(others)} {are} of torch: {as_option(renamed, placed_on)}"


def as_option(renamed: Mapping[str, str], placed_on: Sequence[str]) -> str:
    """Return advice with the complete ``--as`` option, which keeps names that are valid already."""
    kept = {name: new for name in placed_on if is_of_torch(new := renamed.get(name, name))}
    free = (gpu for i in count() if (gpu := f"cuda:{i}") not in kept.values())
    pairs = [f"{name}={kept[name] if name in kept else next(free)}" for name in placed_on]
    return f"say which devices to write instead, as in --as {','.join(pairs)}"
