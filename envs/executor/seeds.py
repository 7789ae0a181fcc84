"""Independent seeds derived from a shared one."""

from __future__ import annotations

import numpy as np


def spread_seed(seed: int, number: int) -> int:
    """Return the 64-bit seed of process ``number`` among those that share a seed.

    Neighboring seeds or numbers give unrelated seeds, so the seeds of a rank's workers can be
    spread from the spread seed of the rank.
    """
    [found] = np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)
    return int(found)
