"""Several searches as one job: their shares of its budget and of its progress."""

from __future__ import annotations

from dataclasses import dataclass

from placer.report.progress import Progress
from placer.search.budget import Budget


@dataclass(frozen=True, slots=True)
class Slice:
    """Progress of one of several searches as a part of the stage that they all are."""

    whole: Progress
    number: int
    count: int

    def stage(self, title: str) -> None:
        """Not told: there would be one for every sub-cluster."""

    def advance(self, share: float, text: str = "") -> None:
        """Told as a share of all."""
        shown = f"{self.number + 1} of {self.count}"
        self.whole.advance(
            (self.number + share) / self.count, f"{shown}: {text}" if text else shown
        )


def share_of(budget: Budget, several: int | None) -> Budget:
    """The budget of each of several searches; on one device there is nothing to search for."""
    if several is None:
        return Budget(evaluations=1)
    if budget.seconds is not None:
        return Budget(seconds=budget.seconds / several)
    assert budget.evaluations is not None
    return Budget(evaluations=max(budget.evaluations // several, 1))
