"""Simulated annealing of devices and order alone: the baseline for learned policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from envs.problem import Problem
from placer.milliseconds import milliseconds
from placer.placers.placer import ALL, LATENCY, MAX_LOAD, Progress
from placer.search.annealing.max_load import balance
from placer.search.annealing.step_time import (
    MOST_STARTS,
    Annealing,
    moves_left,
    walk,
    worthwhile_starts,
)
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, ranked
from placer.search.compiling import load_compiled_code
from placer.search.heuristics import heuristics
from placer.search.judge import Judge


@dataclass(frozen=True, slots=True)
class Annealed:
    """Annealing from the best heuristic, repeated with other seeds if the budget allows.

    ``senders`` as in :class:`placer.search.annealing.step_time.Annealing`.
    """

    senders: float = 0.0
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
        """Return all heuristics and the best annealed placement, best first."""
        if objective == MAX_LOAD:
            return balance(problem, budget, seed, progress=progress, should_stop=should_stop)
        load_compiled_code()  # before the budget starts
        meter = Meter(budget, should_stop)
        judge = Judge(problem)
        known = heuristics(judge)
        meter.spend(len(known))
        meter.note("heuristics", ranked(known)[0].step_ns)
        start, found = ranked(known)[0], []
        starts = worthwhile_starts(moves_left(judge, start, meter))
        seeds = np.random.SeedSequence(seed).generate_state(MOST_STARTS).tolist()
        begin = meter.share()
        for number in range(starts):
            if meter.over():
                break
            annealing = Annealing(judge, start, seeds[number], senders=self.senders)
            meter.spend(1)
            end = begin + (1.0 - begin) * (number + 1) / starts
            walk(annealing, meter, end, lambda cost: _tell(progress, meter, cost))
            found.append(annealing.best())
        return ranked([*known, *ranked(found)[:1]])


def _tell(progress: Progress | None, meter: Meter, cost: int) -> None:
    meter.note("annealing", cost)
    if progress is not None:
        progress(min(meter.share(), 1.0), f"annealing, {milliseconds(cost / 1e9)} ms")
