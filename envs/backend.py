"""The protocol that every backend implements, and the result of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from envs.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of evaluating one placement.

    ``step_s`` is the step time, inf where the placement is not ``feasible``; ``why`` then explains
    the reason to users. ``parts`` breaks the step time down by name (seconds), as far as the
    backend can. ``period_s`` is the additional time per micro-batch in a step of many
    micro-batches. It is None for a step of one micro-batch, and where it is not known: then
    ``why_no_period`` gives the reason.
    """

    step_s: float
    peak_memory_bytes: Mapping[str, int]  # by device name
    feasible: bool = True
    why: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    period_s: float | None = None
    why_no_period: str = ""


class Backend(Protocol):
    """Evaluates placements of a graph by step time: a simulator, or real devices."""

    def evaluate(self, placements: Sequence[Placement]) -> list[StepResult]:
        """Evaluate every placement, in order; one that fails is infeasible, the rest continue."""
        ...
