"""Read-only arrays."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item", bound=np.generic)


def frozen(array: NDArray[Item]) -> NDArray[Item]:
    """Return the array, contiguous and read-only; one that is contiguous is changed in place."""
    whole = np.ascontiguousarray(array)
    whole.setflags(write=False)
    return whole
