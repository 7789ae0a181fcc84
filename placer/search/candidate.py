"""Candidates: named placements with their simulated step time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SINGLE: Final = "single "
"""Prefix of the names of single-device candidates."""
WHERE_ALLOWED: Final = " where allowed"
"""Suffix of their titles if some ops are not allowed on the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A device and a priority for each of N ops; among ready ops the highest priority runs first.

    ``step_ns`` is the simulated step time, INFEASIBLE_NS if the placement breaks a limit.
    ``bound_ns`` is a lower bound proven by the search that made the candidate, over all placements
    of the problem: INFEASIBLE_NS if none is feasible, None if nothing was proven.
    """

    name: str
    devices: NDArray[np.int32]  # (N,)
    priority: NDArray[np.float64]  # (N,)
    step_ns: int
    bound_ns: int | None = None

    @property
    def title(self) -> str:
        """Display name: only a placement with all ops on one device is called single."""
        if not self.name.startswith(SINGLE) or len(np.unique(self.devices)) == 1:
            return self.name
        return self.name.removeprefix(SINGLE) + WHERE_ALLOWED


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates sorted by step time (stable)."""
    return sorted(candidates, key=lambda candidate: candidate.step_ns)


def distinct(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """Return the first ``count`` candidates with different devices.

    Of candidates that differ only in priorities the first is kept.
    """
    kept: dict[bytes, Candidate] = {}
    for candidate in candidates:
        if len(kept) == count:
            break
        kept.setdefault(candidate.devices.tobytes(), candidate)
    return list(kept.values())
