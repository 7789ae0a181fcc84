"""Seeds of those who draw random numbers side by side."""

from __future__ import annotations

import numpy as np


def spread_seed(seed: int, number: int) -> int:
    """The 64-bit seed of the ``number``-th of those who share a seed.

    Seeds that are neighbours, and numbers, give seeds that have nothing in common: those of a
    worker of a rank can be spread from the spread seed of the rank.
    """
    [found] = np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)
    return int(found)
