"""Beam searches one after the other, near the orders of good plans, for as long as they help.

They find what moves of single ops do not: schedules on unequal devices that leave hardly any device
idle. Where transfers decide they find nothing, so they are tried briefly first; see
:mod:`placer.search.list_scheduler.beam`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.beam import Beam

SEARCHES: Final = 24
TRIALS: Final = 4
"""Searches until which one must find a better placement than all known ones."""
FIRST_TRIALS: Final = 2
HOPELESS: Final = 1.25
"""Searches end after the first trials if none is within this multiple of the best known step."""
WIDEST: Final = 16
BEAM_EVALUATIONS: Final = 3
"""A search takes about as long as so many decodes for each of the schedules that it keeps."""
TRIAL_SHARE: Final = 0.05
"""Share of a budget that the trials may take; narrower beams take less."""
BEAM_SHARE: Final = 0.2
"""Maximum share for all searches of what other searches left of the budget."""
MOST_COPIED: Final = 400_000_000
"""Limit of the width times the square of the ops: schedules are copied at every op."""
LEAST_URGENCY: Final = 0.01
MOST_URGENCY: Final = 0.05


def beams_suit(problem: Problem) -> bool:
    """Return whether beams may be worth their time, which they never were on equal devices.

    They see neither hosts nor missing links.
    """
    least_ns = np.where(problem.allowed, problem.cost_ns, INFEASIBLE_NS).min(axis=1, keepdims=True)
    is_unequal = bool((problem.allowed & (problem.cost_ns > least_ns)).any())
    return is_unequal and problem.hosts is None and bool(problem.connected.all())


def affordable_width(evaluator: Evaluator, evaluations: int) -> int:
    """Return how many schedules a search should keep if ``evaluations`` are the whole budget.

    0 where beams do not suit, or where memory is scarce, which they do not see either.
    """
    arrays = evaluator.scheduling
    if arrays.memory_matters or not beams_suit(evaluator.problem):
        return 0
    return min(
        int(evaluations * TRIAL_SHARE) // (TRIALS * BEAM_EVALUATIONS),
        MOST_COPIED // len(arrays.cost) ** 2,
        WIDEST,
    )


def beam_candidates(
    evaluator: Evaluator,
    plans: Sequence[Candidate],
    width: int,
    seed: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Candidate]:
    """Yield the results of beam searches near the orders of ``plans``, the best one first.

    A better placement than all before takes the place of the first plan. Searches end early where
    the first few found none, or once ``is_over``, which is asked also during a search.
    """
    count = evaluator.problem.op_count
    starts, least = [], INFEASIBLE_NS
    for plan in plans:
        if plan.step_ns < INFEASIBLE_NS:
            evaluator.costs(plan.devices[None], plan.priority[None])
            starts.append(evaluator.work.start_ns[:count].astype(np.float64))
            least = min(least, plan.step_ns)
    if not starts:
        return
    beam, random = Beam(evaluator.scheduling, width), np.random.default_rng(seed)
    improved, nearest = False, INFEASIBLE_NS
    for number in range(SEARCHES):
        if number == TRIALS and not improved:
            return
        if number == FIRST_TRIALS and nearest > HOPELESS * least:
            return
        factor = (MOST_URGENCY / LEAST_URGENCY) ** random.random()
        urgency = round(LEAST_URGENCY * factor, 9)  # powers differ in the last bit by machine
        plan_ns = starts[number // 2 % len(starts)]
        for _ in beam.steps(plan_ns, urgency=urgency, eager=number % 2 == 1):
            if is_over():
                return
        devices, priority = beam.found()
        candidate = evaluator.candidate(Kind.BEAM, devices, priority)
        nearest = min(nearest, candidate.step_ns)
        if candidate.step_ns < least:
            improved, least = True, candidate.step_ns
            evaluator.costs(devices[None], candidate.priority[None])
            starts[0] = evaluator.work.start_ns[:count].astype(np.float64)
        yield candidate
