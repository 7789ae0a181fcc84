"""Search trace: the improvements found by each part of a search, with time and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """An improvement over all earlier placements of the same part."""

    evaluations: int  # spent by all parts of the search until then
    seconds: float  # since the search began
    cost_s: float  # simulated value of the objective


@dataclass(slots=True)
class Line:
    """The improvements of one part of a search, in order."""

    name: str
    finds: list[Find] = field(default_factory=list)
    evaluations: int = 0  # at its last report
    seconds: float = 0.0


@dataclass(slots=True)
class Trail:
    """One line for each part of a search, in order of their starts."""

    lines: dict[str, Line] = field(default_factory=dict)

    def note(self, name: str, evaluations: int, seconds: float, cost_s: float) -> None:
        """Record the best cost of ``name`` so far."""
        line = self.lines.setdefault(name, Line(name))
        line.evaluations, line.seconds = evaluations, seconds
        if not line.finds or cost_s < line.finds[-1].cost_s:
            line.finds.append(Find(evaluations=evaluations, seconds=seconds, cost_s=cost_s))
