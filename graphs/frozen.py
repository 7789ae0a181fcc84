"""Arrays that nobody writes to any more."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item", bound=np.generic)


def frozen(array: NDArray[Item]) -> NDArray[Item]:
    """The array, contiguous and read-only; the very same one where it was contiguous."""
    whole = np.ascontiguousarray(array)
    whole.setflags(write=False)
    return whole
