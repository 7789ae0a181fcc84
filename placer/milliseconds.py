"""Formats times in milliseconds with four significant digits, for all tables and messages.

The HTML report does the same in ``placer/report/assets/units.js``.
"""

from __future__ import annotations

import math
from typing import Final

DIGITS: Final = 4
MOST_PLACES: Final = 6
"""Decimal places of a millisecond: the simulator counts nanoseconds."""


def milliseconds(seconds: float) -> str:
    """Format a finite time in ms, without unit; trailing zeros are kept so that columns align.

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
