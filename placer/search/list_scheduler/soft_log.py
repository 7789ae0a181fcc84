"""Soft logarithm of features, the same on every machine, for arrays and in compiled loops.

The bits of y = 1 + x, read as an integer, are a logarithm of y that is exact at powers of two and
straight in between. A parabola bends it: the result is within .0055 of log(1 + x).
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import FRACTION_BITS, bits_of, compiled_inline, fraction_bits
from envs.problem import Singles

ONE: Final = np.float32(1.0)
UNIT: Final = np.float32(2.0**-23)
"""Weight of the last bit of a number in [1, 2)."""
BIAS: Final = np.float32(127.0)
"""Exponent of 1.0 as it is stored."""
BEND: Final = np.float32(0.3465)
_LARGEST: Final = np.finfo(np.float32).max
LN2: Final = np.float32(math.log(2.0))


def soft_log(x: NDArray[np.floating[Any]]) -> Singles:
    """Approximate log(1 + x) for x >= 0; numbers too large for single precision are the largest."""
    bits = (np.minimum(x, _LARGEST).astype(np.float32) + ONE).view(np.int32)
    whole = bits.astype(np.float32) * UNIT - BIAS
    part = (bits & FRACTION_BITS).astype(np.float32) * UNIT
    return np.asarray((whole + BEND * part * (ONE - part)) * LN2)


@compiled_inline
def soft_log_of(x: np.float32) -> np.float32:
    """Approximate log(1 + x) as :func:`soft_log` does, in compiled callers."""
    y = x + ONE
    whole = np.float32(bits_of(y)) * UNIT - BIAS
    part = np.float32(fraction_bits(y)) * UNIT
    return (whole + BEND * part * (ONE - part)) * LN2
