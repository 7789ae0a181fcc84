"""Min-cut partitions."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from placer.placers.rules import sorted_for
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.grouping import units
from placer.search.min_cut import min_cut
from placer.search.request import ALL, SearchRequest

TRIES: Final = 8


class MinCut:
    """The best of several METIS partitions with different seeds; requires pymetis."""

    objectives: ClassVar[tuple[str, ...]] = ALL

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best partition."""
        evaluator, meter = Evaluator(request.problem), request.meter()
        rows, found = units(request.problem), list[Candidate]()
        seeds = np.random.SeedSequence(request.seed).generate_state(TRIES) >> 1  # METIS: 31 bits
        for of_metis in seeds.tolist():
            if found and meter.over():
                break
            devices = min_cut(rows, evaluator.scheduling, of_metis)
            found.append(
                evaluator.candidate(Kind.MIN_CUT, devices, evaluator.scheduling.bottom_level)
            )
            meter.spend(1)
            meter.note(Kind.MIN_CUT.value, min(plan.step_ns for plan in found))
            request.report(max(meter.share(), len(found) / TRIES), Kind.MIN_CUT.value)
        return sorted_for(request.objective, request.problem, found)[:1]
