"""Arguments that several commands take, checked while they are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

LARGEST_SEED: Final = 2**32 - 1
"""What every random generator that is seeded takes, those of torch and numpy among them."""


def seed(text: str) -> int:
    """A seed.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        given = int(text)
    except ValueError:
        given = -1
    if not 0 <= given <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no seed: give a whole number from 0 to {LARGEST_SEED}"
        )
    return given


def count(text: str) -> int:
    """A whole number from 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        given = int(text)
    except ValueError:
        given = 0
    if given < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1")
    return given


def pin(text: str) -> tuple[str, str]:
    """Name and device of ``NAME=DEVICE``.

    Raises:
        argparse.ArgumentTypeError: one of them is missing.
    """
    name, _, device = text.rpartition("=")
    if not name or not device:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no pin: give NAME=DEVICE, such as embed=core:0"
        )
    return name, device


def pins_of(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """{name: device}.

    Raises:
        ValueError: a name is pinned to two devices.
    """
    pins: dict[str, str] = {}
    for name, device in pairs:
        if pins.setdefault(name, device) != device:
            raise ValueError(f"--pin {name!r} is given with {pins[name]} and with {device}")
    return pins
