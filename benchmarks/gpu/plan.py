"""Which parts are measured of which model, in which order, and how long they take on an H200.

All kinds of parts come for the first model before a second one has its turn, of which the offload
table and copies are measured. Two models fill eight minutes; ``--models`` chooses others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

PROFILE: Final = "profile"
NO_LIMIT: Final = "no limit"
OVERHEAD: Final = "overhead"
SINGLE_OPS: Final = "single ops"
SHARES: Final = {"75%": 0.75, "50%": 0.5, "30%": 0.3}
INFERENCE: Final = "inference, 50% of the weights"
OVERLAP: Final = "overlap"
PROCESS_EACH: Final = "a process for each device"
IN_PROCESSES: Final = "in 3 processes"
COMPILED: Final = "compiled"

FIRST: Final = (
    *(PROFILE, NO_LIMIT, OVERHEAD, SINGLE_OPS, *SHARES, INFERENCE, OVERLAP, PROCESS_EACH),
    *(IN_PROCESSES, COMPILED),
)
OTHERS: Final = (PROFILE, *SHARES, OVERLAP)
MODELS: Final = ("mixture of experts", "recommendation")
LIMIT_S: Final = 460.0
BEFORE_S: Final = 1.2
"""Calibration and loading of compiled code."""

EXPECTED_S: Final = {
    "mixture of experts": {
        # recorded, and the run of all ops on the GPU that tells their peak
        PROFILE: 13.9 + 2,
        # recorded with extraction and profile, 9.0 s, and four rounds more of the slow rows,
        # which run each step twice at least
        NO_LIMIT: 72.6 - 9.0 - 4 * 2 * (1.04 + 0.71),
        OVERHEAD: 2.8,
        SINGLE_OPS: 6.0,  # never run
        # recorded, and about four trials of the baseline
        "75%": 18.2 + 4 * 2,
        "50%": 35.9 + 4 * 2,
        "30%": 35.9 + 4 * 2,  # 1.2 times the one above in three rounds of an earlier version
        INFERENCE: 14.5 + 17.0,  # recorded with three rounds, and accelerate's apart
        OVERLAP: 22.1,
        PROCESS_EACH: 56.9 * 2 / 3,  # recorded with three placements
        IN_PROCESSES: 20.0,  # never run
        COMPILED: 75.0,  # never run
    },
    "recommendation": {
        PROFILE: 9.0 + 2,
        "75%": 11.8 + 4,
        "50%": 11.8 + 4,  # as the one above in three rounds of an earlier version
        "30%": 11.8 + 4,
        OVERLAP: 12.1,
    },
}
"""Seconds on an H200 by model and kind of part, from ``benchmarks/results/*h200*.json``."""


def parts(models: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the model and the kind of every part in order."""
    for number, model in enumerate(models):
        for kind in OTHERS if number else FIRST:
            yield model, kind


def expected_s(model: str, kind: str) -> float:
    """Return how long a part takes on an H200, 0 if nothing is known."""
    return EXPECTED_S.get(model, {}).get(kind, 0.0)
