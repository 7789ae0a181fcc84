"""Search trace: the improvements found by each part of a search, with time and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """An improvement over all earlier placements of the same part."""

    evaluations: int  # spent by all parts of the search until then
    seconds: float  # since the search began
    cost_s: float  # simulated value of the objective


@dataclass(slots=True)
class PartTrace:
    """The improvements of one part of a search, in order."""

    name: str
    improvements: list[Improvement] = field(default_factory=list)
    evaluations: int = 0  # at its last report
    seconds: float = 0.0


@dataclass(slots=True)
class SearchTrace:
    """The trace of each part of a search, in order of their starts."""

    parts: dict[str, PartTrace] = field(default_factory=dict)

    def note(self, name: str, evaluations: int, seconds: float, cost_s: float) -> None:
        """Record the best cost of ``name`` so far."""
        part = self.parts.setdefault(name, PartTrace(name))
        part.evaluations, part.seconds = evaluations, seconds
        if not part.improvements or cost_s < part.improvements[-1].cost_s:
            part.improvements.append(
                Improvement(evaluations=evaluations, seconds=seconds, cost_s=cost_s)
            )
