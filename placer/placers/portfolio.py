"""The default search of ``optimize``, a portfolio, and its annealing alone.

Simulated annealing of devices and order is the baseline for learned policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from placer.milliseconds import milliseconds
from placer.search.annealing.max_load import minimize_max_load
from placer.search.annealing.step_time import (
    MOST_STARTS,
    Annealing,
    affordable_moves,
    anneal,
    worthwhile_starts,
)
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.portfolio import Proposer, search
from placer.search.request import ALL, MAX_LOAD, SearchRequest


@dataclass(frozen=True, slots=True)
class Annealed:
    """Annealing from the best heuristic, repeated with other seeds if the budget allows.

    ``senders`` as in :class:`placer.search.annealing.step_time.Annealing`.
    """

    senders: float = 0.0
    objectives: ClassVar[tuple[str, ...]] = ALL

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all heuristics and the best annealed placement, best first."""
        if request.objective == MAX_LOAD:
            return balanced(request)
        load_compiled_code()  # before the budget starts
        meter = request.meter()
        evaluator = Evaluator(request.problem)
        known = heuristics(evaluator)
        meter.spend(len(known))
        meter.note("heuristics", ranked(known)[0].step_ns)
        start, found = ranked(known)[0], []
        starts = worthwhile_starts(affordable_moves(evaluator, start, meter))
        seeds = np.random.SeedSequence(request.seed).generate_state(MOST_STARTS).tolist()
        begin = meter.share()

        def tell(cost: int) -> None:
            meter.note(Kind.ANNEALING.value, cost)
            request.report(meter.share(), f"annealing, {milliseconds(cost / 1e9)} ms")

        for number in range(starts):
            if meter.over():
                break
            annealing = Annealing(evaluator, start, seeds[number], senders=self.senders)
            meter.spend(1)
            anneal(annealing, meter, begin + (1.0 - begin) * (number + 1) / starts, tell)
            found.append(annealing.best())
        return ranked([*known, *ranked(found)[:1]])


def balanced(request: SearchRequest) -> list[Candidate]:
    """Return candidates for the objective max-load, best first."""
    return minimize_max_load(
        request.problem,
        request.budget,
        request.seed,
        progress=request.progress,
        should_stop=request.should_stop,
        search_trace=request.search_trace,
    )


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Heuristics, a policy if given, evolution and annealing; see :mod:`placer.search.portfolio`.

    For the objective max-load annealing runs alone, without a policy.
    """

    policy: Proposer | None = None
    objectives: ClassVar[tuple[str, ...]] = ALL

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all heuristics and the best placement of each search, best first."""
        if request.objective == MAX_LOAD:
            return balanced(request)
        return search(request, self.policy)
