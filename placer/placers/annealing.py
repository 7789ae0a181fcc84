"""Simulated annealing alone: what learning has to beat."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np

from envs.problem import Problem
from placer.placers.placer import ALL, LATENCY, MAX_LOAD, Progress
from placer.search.annealing import Annealing
from placer.search.balancing import balance
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, ranked
from placer.search.heuristics import heuristics
from placer.search.judge import Judge
from placer.search.portfolio import load_compiled_code

STARTS: Final = 3
STEPS_PER_START: Final = 15_000
"""It starts again where each start gets at least so many moves."""
LARGEST_CHUNK: Final = 4096
FINE: Final = 1_000_000_000
"""Whole-number resolution of the schedule under a budget of seconds."""


class Annealed:
    """From the best heuristic, and again from it with other random numbers where there is time."""

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
        """All heuristics and the best plan of all starts, the best first."""
        if objective == MAX_LOAD:
            return balance(problem, budget, seed, progress=progress, should_stop=should_stop)
        load_compiled_code()  # not at the cost of the budget
        meter = Meter(budget, should_stop)
        judge = Judge(problem)
        known = heuristics(judge)
        meter.spend(len(known))
        start, found = ranked(known)[0], []
        starts = _starts(judge, start, meter)
        seeds = np.random.SeedSequence(seed).generate_state(STARTS).tolist()
        begin = meter.share()
        for number in range(starts):
            if meter.over():
                break
            annealing = Annealing(judge, start, seeds[number])
            meter.spend(1)
            _walk(annealing, meter, begin + (1.0 - begin) * (number + 1) / starts, progress)
            found.append(annealing.best())
        return ranked([*known, *ranked(found)[:1]])


def _starts(judge: Judge, plan: Candidate, meter: Meter) -> int:
    """How many starts the budget is good for."""
    steps = meter.left()
    if steps is None:
        assert meter.budget.seconds is not None
        began = meter.seconds()
        judge.costs(plan.devices[None], plan.priority[None])
        now = meter.seconds()
        steps = int((meter.budget.seconds - now) / max(now - began, 1e-6))
    return max(1, min(STARTS, steps // STEPS_PER_START))


def _walk(annealing: Annealing, meter: Meter, end: float, progress: Progress | None) -> None:
    """Anneal until ``end`` of the budget is spent, the schedule stretched over what is left."""
    begin, evaluations = meter.share(), meter.budget.evaluations
    total = FINE if evaluations is None else max(round(end * evaluations) - meter.spent, 0)
    done, chunk = 0, 1
    while not meter.over(end):
        began = meter.seconds()
        if evaluations is None:
            steps, stride = chunk, 0
            done = int((meter.share() - begin) / max(end - begin, 1e-9) * FINE)
        else:
            steps, stride = min(chunk, total - done), 1
            if steps <= 0:
                break
        annealing.run(steps, first=done, stride=stride, total=total)
        done += steps
        meter.spend(steps)
        rate = steps / max(meter.seconds() - began, 1e-6)
        chunk = int(min(max(rate * meter.chunk_s, 1), 2 * chunk, LARGEST_CHUNK))
        if progress is not None:
            progress(min(meter.share(), 1.0), f"annealing, {annealing.best_cost / 1e6:.3f} ms")
