"""Annealing within a part of a budget, with the number of starts and the temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from placer.search.annealing import HOT, Annealing
from placer.search.budget import Meter
from placer.search.candidate import Candidate
from placer.search.judge import Judge

MOST_STARTS: Final = 3
STEPS_PER_START: Final = 15_000
"""Minimum number of moves that justifies another start."""
MOVES_OF_OP: Final = 500
"""With more moves per op than this, annealing starts hotter."""
MOST_HEAT: Final = 20.0
LARGEST_CHUNK: Final = 4096
FINE: Final = 1_000_000_000
"""Integer resolution of the schedule under a budget of seconds."""


def walk(annealing: Annealing, meter: Meter, end: float, tell: Callable[[int], None]) -> None:
    """Anneal until the share ``end`` of the budget is spent, over the rest of the schedule.

    ``tell`` is called with the best cost about every ``meter.chunk_s``.
    """
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
        tell(annealing.best_cost)
        chunk = next_chunk(meter, chunk, steps, meter.seconds() - began)


def moves_left(judge: Judge, plan: Candidate, meter: Meter) -> int:
    """Estimate how many moves the remaining budget allows; this may cost one evaluation."""
    steps = meter.left()
    if steps is None:
        assert meter.budget.seconds is not None
        began = meter.seconds()
        judge.costs(plan.devices[None], plan.priority[None])
        now = meter.seconds()
        steps = int((meter.budget.seconds - now) / max(now - began, 1e-6))
    return steps


def worthwhile_starts(moves: int) -> int:
    """Return from how many placements to anneal, given the total number of moves."""
    return max(1, min(MOST_STARTS, moves // STEPS_PER_START))


def heat(moves: int, op_count: int) -> float:
    """Return the initial relative temperature for this many moves from one placement.

    With few moves per op it pays to stay near the start, with many to leave it.
    """
    plenty = moves / (op_count * MOVES_OF_OP)
    return HOT * min(max(plenty**2, 1.0), MOST_HEAT)


def next_chunk(
    meter: Meter, chunk: int, done: int, seconds: float, most: int = LARGEST_CHUNK
) -> int:
    """Return how many steps to make until the next look at the clock, by the rate of the last."""
    rate = done / max(seconds, 1e-6)
    return int(min(max(rate * meter.chunk_s, 1), 2 * chunk, most))
