"""Memory sizes and times as people read and write them: ``8GiB``, ``1.5 TB``, ``26.10`` ms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("kMGT")},
    **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
"""Bytes by unit: decimal prefixes, and binary ones with an i."""
DIGITS: Final = 4
MOST_PLACES: Final = 6
"""Decimal places of a millisecond: the simulator counts nanoseconds."""


def parse_bytes(text: str) -> int:
    """Return a size in whole bytes; a fraction of a byte is dropped.

    >>> parse_bytes("1.5GiB"), parse_bytes("1.5 GB")
    (1610612736, 1500000000)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None or match[2] not in UNITS:
        raise ValueError(
            f"{text[:40]!r} is no size: write a number and one of {', '.join(filter(None, UNITS))}"
        )
    return int(Decimal(match[1]) * UNITS[match[2]])


def parse_limits(text: str) -> dict[str, int]:
    """Parse memory limits such as ``cuda:0=8GiB,cpu=64GiB`` into {device name: bytes}."""
    limits: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.rpartition("="))
        if not name:
            raise ValueError(f"{size[:40]!r} is no limit: write a device and a size, cuda:0=8GiB")
        if limits.setdefault(name, parse_bytes(size)) != parse_bytes(size):
            raise ValueError(f"{name} has two limits of its memory, in {text[:80]!r}")
    return limits


def human_bytes(size: float) -> str:
    """Return a size in decimal units, as in data sheets.

    >>> human_bytes(21_400_000_000)
    '21.4 GB'
    >>> human_bytes(512)
    '512 B'
    """
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.95 or unit == "TB":
            break
        value /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def milliseconds(seconds: float) -> str:
    """Format a finite time in ms, without unit, as ``placer/report/assets/units.js`` does.

    Trailing zeros are kept so that columns align.

    >>> milliseconds(0.0261), milliseconds(0.35214), milliseconds(0.0)
    ('26.10', '352.1', '0')
    """
    if seconds == 0:
        return "0"
    ms = seconds * 1e3
    exponent = int(f"{ms:.{DIGITS - 1}e}".partition("e")[2])  # exponent after rounding
    return f"{ms:.{min(max(DIGITS - 1 - exponent, 0), MOST_PLACES)}f}"


def ratio_of(one_s: float, other_s: float) -> float:
    """Return one time divided by another, which may be 0.

    >>> ratio_of(3.0, 2.0), ratio_of(0.0, 0.0), ratio_of(1.0, 0.0)
    (1.5, 1.0, inf)
    """
    if other_s:
        return one_s / other_s
    return math.inf if one_s else 1.0
