"""Arguments that several commands take, checked while they are parsed."""

from __future__ import annotations

import argparse
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
