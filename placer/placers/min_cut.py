"""Min-cut partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np

from envs.problem import Problem
from placer.placers.placer import ALL, LATENCY, Progress
from placer.placers.rule import sorted_for
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate
from placer.search.grouping import units
from placer.search.judge import Judge
from placer.search.min_cut import min_cut

TRIES: Final = 8


class MinCut:
    """The best of several METIS partitions with different seeds; requires pymetis."""

    objectives: ClassVar[tuple[str, ...]] = ALL

    def place(
        self,
        problem: Problem,
        budget: Budget,
        seed: int,
        *,
        objective: str = LATENCY,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Candidate]:
        """Return the best partition; see :class:`placer.placers.placer.Placer`."""
        judge, meter = Judge(problem), Meter(budget, should_stop)
        rows, found = units(problem), list[Candidate]()
        seeds = np.random.SeedSequence(seed).generate_state(TRIES) >> 1  # METIS takes 31 bits
        for of_metis in seeds.tolist():
            if found and meter.over():
                break
            devices = min_cut(rows, judge.outline, of_metis)
            found.append(judge.candidate("min-cut", devices, judge.outline.bottom_level))
            meter.spend(1)
            meter.note("min-cut", min(plan.step_ns for plan in found))
            if progress is not None:
                progress(min(max(meter.share(), len(found) / TRIES), 1.0), "min-cut")
        return sorted_for(objective, problem, found)[:1]
