"""Conversion of seconds to integer nanoseconds, rounded half to even and capped at the horizon.

Links and devices limit their own numbers (see :mod:`envs.hardware.cluster`), so that seconds are
finite.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_inline

HORIZON_BITS: Final = 39
HORIZON_NS: Final = 1 << HORIZON_BITS
"""Upper bound on step times, 550 s."""


def nanoseconds(seconds: float, at_most: int = HORIZON_NS) -> int:
    """Return seconds as whole nanoseconds, no more than ``at_most``.

    >>> nanoseconds(1.5e-6), nanoseconds(1e30) == HORIZON_NS
    (1500, True)
    """
    return round(min(seconds * 1e9, float(at_most)))


def each_in_nanoseconds(seconds: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return every element of an array of seconds as nanoseconds, at most ``HORIZON_NS``."""
    return np.asarray(np.rint(np.minimum(seconds * 1e9, float(HORIZON_NS))), np.int64)


@compiled_inline
def transfer_ns(latency_s: float, size: int, bandwidth_bytes_per_s: float) -> int:
    """Return the nanoseconds of a transfer of ``size`` bytes, rounded as in :func:`nanoseconds`."""
    seconds = latency_s + size / bandwidth_bytes_per_s
    return int(np.rint(min(seconds * 1e9, float(HORIZON_NS))))
