"""Shares of budget and progress for several searches of one job."""

from __future__ import annotations

from dataclasses import dataclass

from placer.report.progress import Progress
from placer.search.budget import Budget


@dataclass(frozen=True, slots=True)
class Slice:
    """Reports the progress of one of several searches as part of their common stage."""

    whole: Progress
    number: int
    count: int

    def stage(self, title: str) -> None:
        """Ignore the title: there would be one stage per search."""

    def advance(self, share: float, text: str = "") -> None:
        """Report the share of all searches."""
        shown = f"{self.number + 1} of {self.count}"
        self.whole.advance(
            (self.number + share) / self.count, f"{shown}: {text}" if text else shown
        )


def share_of(budget: Budget, several: int | None) -> Budget:
    """Return the budget of each of several searches; one evaluation if ``several`` is None."""
    if several is None:
        return Budget(evaluations=1)
    if budget.seconds is not None:
        return Budget(seconds=budget.seconds / several)
    assert budget.evaluations is not None
    return Budget(evaluations=max(budget.evaluations // several, 1))
