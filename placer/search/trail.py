"""How a search went: who found better plans, when, and after how many evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """A plan better than all that its finder had before."""

    evaluations: int  # spent of the budget until then, by whomever
    seconds: float  # since the search began
    cost_s: float  # simulated, of what the search makes small


@dataclass(slots=True)
class Line:
    """The finds of one part of a search, each better than the one before it."""

    name: str
    finds: list[Find] = field(default_factory=list)
    evaluations: int = 0  # when it was heard of last
    seconds: float = 0.0


@dataclass(slots=True)
class Trail:
    """One line for each part of a search, in order of their beginnings."""

    lines: dict[str, Line] = field(default_factory=dict)

    def note(self, name: str, evaluations: int, seconds: float, cost_s: float) -> None:
        """Hear the best cost that ``name`` knows by now."""
        line = self.lines.setdefault(name, Line(name))
        line.evaluations, line.seconds = evaluations, seconds
        if not line.finds or cost_s < line.finds[-1].cost_s:
            line.finds.append(Find(evaluations=evaluations, seconds=seconds, cost_s=cost_s))


_current: ContextVar[Trail | None] = ContextVar("trail", default=None)


@contextmanager
def recorded() -> Iterator[Trail]:
    """Records what meters hear that are made within; elsewhere nothing is kept."""
    trail = Trail()
    token = _current.set(trail)
    try:
        yield trail
    finally:
        _current.reset(token)


def current_trail() -> Trail | None:
    """The trail of whoever records, None if nobody does."""
    return _current.get()
