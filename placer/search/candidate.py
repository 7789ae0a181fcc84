"""A candidate: a named plan with its simulated step time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SINGLE: Final = "single "
"""How the names of single-device candidates begin."""
WHERE_ALLOWED: Final = " where allowed"
"""How they end, to people, where some ops may not run on the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A device and a priority for each of N ops; of ready ops the highest priority runs first.

    ``step_ns`` is the simulated step, INFEASIBLE_NS where the plan breaks a limit. ``bound_ns`` is
    what its finder proved that no plan of the same problem beats: INFEASIBLE_NS if none can run,
    None if it proved nothing.
    """

    name: str
    devices: NDArray[np.int32]  # (N,)
    priority: NDArray[np.float64]  # (N,)
    step_ns: int
    bound_ns: int | None = None

    @property
    def title(self) -> str:
        """The name for people, who call single only what is on one device."""
        if not self.name.startswith(SINGLE) or len(np.unique(self.devices)) == 1:
            return self.name
        return self.name.removeprefix(SINGLE) + WHERE_ALLOWED


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates by step time; of equal ones the first given comes first."""
    return sorted(candidates, key=lambda candidate: candidate.step_ns)


def distinct(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """The first ``count`` candidates that differ in the device of at least one op.

    Two plans with equal devices differ in order alone; of those the first given is kept.
    """
    kept: dict[bytes, Candidate] = {}
    for candidate in candidates:
        if len(kept) == count:
            break
        kept.setdefault(candidate.devices.tobytes(), candidate)
    return list(kept.values())
