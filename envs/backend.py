"""How long does a step take: what every backend answers, and the protocol it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from envs.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One evaluated placement.

    ``step_s`` is inf where the placement is not ``feasible``; ``why`` then says what stands in the
    way, for people. ``parts`` breaks the time down (seconds, by name), as far as the backend can.
    ``period_s`` is the time that every further micro-batch takes in a step of many of them, None
    for a step of one, and where ``why_no_period`` says why it is not known.
    """

    step_s: float
    peak_memory_bytes: Mapping[str, int]  # by device name
    feasible: bool = True
    why: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    period_s: float | None = None
    why_no_period: str = ""


class Backend(Protocol):
    """Says how long one step of a placed graph takes: a simulator, or real devices."""

    def evaluate(self, placements: Sequence[Placement]) -> list[StepResult]:
        """Time every placement, in order; a failed one is infeasible and does not stop the rest."""
        ...
