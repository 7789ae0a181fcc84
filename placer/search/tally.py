"""Evaluation of placements one by one within a budget, keeping the best."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.simulator import OVERFULL_NS
from placer.milliseconds import milliseconds
from placer.search.candidate import Candidate, Kind
from placer.search.judge import Judge
from placer.search.request import SearchRequest


class Tally:
    """The best of the evaluated placements.

    The first placement is evaluated whatever the budget, so that there is always a best one.
    """

    def __init__(self, request: SearchRequest, kind: Kind, name: str = "") -> None:
        """Begin to spend the budget; the best candidate gets this kind and, if given, this name."""
        self.judge = Judge(request.problem)
        self.meter = request.meter()
        self.kind = kind
        self.name = name or kind.value
        self.report = request.report
        self._best: tuple[int, NDArray[np.int32], NDArray[np.float64]] | None = None

    def over(self) -> bool:
        """Return whether the budget is spent, after at least one evaluation."""
        return self._best is not None and self.meter.over()

    def room(self, most: int) -> int:
        """Return how many of ``most`` evaluations the budget has left, at least 1."""
        left = self.meter.left()
        return most if left is None else max(min(most, left), 1)

    def judged(self, devices: NDArray[np.int32], priority: NDArray[np.float64]) -> int:
        """Evaluate a placement, (N,) each, and return its cost as defined by :class:`Judge`."""
        cost = int(self.judge.costs(devices[None], priority[None])[0])
        self.meter.spend(1)
        if self._best is None or cost < self._best[0]:
            self._best = cost, devices.copy(), priority.copy()
        self.meter.note(self.name, self._best[0])
        best = self._best[0]
        shown = "nothing fits" if best >= OVERFULL_NS else f"{milliseconds(best / 1e9)} ms"
        self.report(self.meter.share(), f"{self.name}, {shown}")
        return cost

    def all_judged(
        self, devices: NDArray[np.int32], priority: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return costs of placements (B, N) each; fewer than B if the budget ends."""
        costs: list[int] = []
        for where, when in zip(devices, priority, strict=True):
            if self.over():
                break
            costs.append(self.judged(where, when))
        return np.array(costs, np.int64)

    def best(self) -> Candidate:
        """Return the best placement; the first of equal ones."""
        assert self._best is not None, "a placer judges at least one plan"
        cost, devices, priority = self._best
        return self.judge.candidate(self.kind, devices, priority, cost, name=self.name)
