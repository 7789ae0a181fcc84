"""Search for the objective max-load: rounds of annealing, each from the best placement so far.

A round is short because it ends in one of many local optima that more moves do not leave. The first
rounds start from the best heuristics; later rounds draw their initial temperature at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.max_load import max_load_ns
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.sweep_plan import narrow_order
from placer.milliseconds import milliseconds
from placer.search.balance_run import Balancing, load_compiled_code
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, Kind
from placer.search.heuristics import heuristics
from placer.search.judge import Judge
from placer.search.pipeline_parts import pipeline_parts
from placer.search.trail import Trail
from placer.search.walking import next_chunk

HOT: Final = 3e-2
COOLEST: Final = 1e-3
HOTTEST: Final = 1e-1
"""Initial relative temperatures: HOT for the first rounds, COOLEST .. HOTTEST for later ones."""
STARTS: Final = 3
FEWEST_MOVES: Final = 20_000
MOVES_PER_OP: Final = 500
"""A round has MOVES_PER_OP moves per op, at least FEWEST_MOVES; fewer if the budget ends."""
LARGEST_CHUNK: Final = 1 << 16
SEEDS_APART: Final = 1_000_003
MOST_OPS_IN_NARROW_ORDER: Final = 5000
"""Computing the narrow order takes seconds for larger graphs."""


def balance(
    problem: Problem,
    budget: Budget,
    seed: int,
    *,
    progress: Callable[[float, str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    trail: Trail | None = None,
) -> list[Candidate]:
    """Search for a placement with a small maximum load.

    Args:
        problem: graph and cluster.
        budget: seconds, counted after compiled code is loaded, or moves. With moves the result
            depends on ``seed`` alone.
        seed: random seed.
        progress: called with the spent share of the budget, 0 .. 1, and a text.
        should_stop: polled about every 0.05 s.
        trail: records the improvements of the search, if given.

    Returns:
        All heuristics, contiguous parts and the best placement of the search, smallest load first.
    """
    load_compiled_code()
    meter = Meter(budget, should_stop, trail=trail)
    judge = Judge(problem)
    found = heuristics(judge)
    if problem.device_count > 1:
        orders = _orders(problem)
        level = judge.outline.bottom_level
        parts = (pipeline_parts(problem, order) for order in orders)
        found += [judge.candidate(Kind.CONTIGUOUS_PARTS, own, level) for own in parts]
        best = _anneal_in_rounds(
            problem, _by_load(problem, found), orders[-1], seed, meter, progress
        )
        found.append(judge.candidate(Kind.ANNEALING, best, level))
    if progress is not None:
        progress(1.0, "done")
    return _by_load(problem, found)


def _orders(problem: Problem) -> list[NDArray[np.int32]]:
    orders = [problem.graph.topological]
    if problem.op_count <= MOST_OPS_IN_NARROW_ORDER:
        orders.append(narrow_order(problem.graph))
    return orders


def _by_load(problem: Problem, plans: list[Candidate]) -> list[Candidate]:
    loads = max_load_ns(problem, np.array([plan.devices for plan in plans]))
    return [plans[i] for i in np.argsort(loads, kind="stable").tolist()]


def _anneal_in_rounds(
    problem: Problem,
    starts: list[Candidate],
    order: NDArray[np.int32],
    seed: int,
    meter: Meter,
    progress: Callable[[float, str], None] | None,
) -> NDArray[np.int32]:
    """Return the best placement (N,) of all rounds; at least one round is run."""
    rng = np.random.default_rng(seed)
    best: Balancing | None = None
    number = 0
    while best is None or not meter.over():
        start, hot = starts[min(number, len(starts) - 1)].devices, HOT
        if best is not None and number >= STARTS:
            start = best.best_devices()
            hot = COOLEST * (HOTTEST / COOLEST) ** float(rng.random())
        run = Balancing(problem, start, order, seed * SEEDS_APART + number)
        _spend(run, meter, hot, max(FEWEST_MOVES, MOVES_PER_OP * problem.op_count), best, progress)
        if best is None or run.best_ns < best.best_ns:
            best = run
        number += 1
    return best.best_devices()


def _spend(
    run: Balancing,
    meter: Meter,
    hot: float,
    moves: int,
    best: Balancing | None,
    progress: Callable[[float, str], None] | None,
) -> None:
    """Run one round; if the budget ends earlier, compress its schedule into what is left."""
    begin = meter.share()
    left = meter.left()
    total = moves if left is None else max(min(moves, left), 1)
    at, chunk = 0, 256
    while at < total and not meter.over():
        began = meter.seconds()
        steps = min(chunk, total - at)
        run.run(steps, first=at, total=total, hot=hot)
        meter.spend(steps)
        squeezed = (meter.share() - begin) / max(1.0 - begin, 1e-9) * total
        at = max(at + steps, int(squeezed)) if left is None else at + steps
        chunk = next_chunk(meter, chunk, steps, meter.seconds() - began, LARGEST_CHUNK)
        best_ns = run.best_ns if best is None else min(run.best_ns, best.best_ns)
        meter.note(Kind.ANNEALING.value, best_ns)
        if progress is not None:
            known = (
                "nothing fits" if best_ns == INFEASIBLE_NS else f"{milliseconds(best_ns / 1e9)} ms"
            )
            progress(min(meter.share(), 1.0), f"annealing, {known}")
