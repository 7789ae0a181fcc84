"""Annealing runs side by side, one per worker, that continue from the best of them now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from placer.search.annealing.run import FINEST, Annealing, anneal
from placer.search.annealing.step_time import StepTimeAnnealing
from placer.search.request import Meter
from placer.search.workers import Workers

EXCHANGES: Final = 16
FIRST_EXCHANGE: Final = 0.05
"""Exchanges of a run, at equal distances from this share of its schedule to its end."""


def anneal_islands(
    islands: Sequence[Annealing],
    meter: Meter,
    workers: Workers,
    *,
    end: float = 1.0,
    moves: int | None = None,
    exchange: Callable[[], int] | None = None,
) -> Iterator[int]:
    """Anneal at most one island per worker as :func:`anneal` does; yield the best costs.

    Each island makes ``moves`` moves, or its share of those that are left. ``exchange`` is called
    EXCHANGES times and returns the evaluations that it needed. A single island is annealed alone.
    """
    if len(islands) == 1:
        yield from anneal(islands[0], meter, end=end, moves=moves)
        return
    begin, left = meter.share(), meter.left(end)
    share = None if left is None else left // len(islands)
    total = min((count for count in (moves, share) if count is not None), default=FINEST)
    done, chunk, exchanged = 0, 1, 0
    while done < total and not meter.over(end):
        border = total if exchange is None else _border(total, exchanged)
        began = meter.seconds()
        steps = min(chunk, border - done)
        if left is not None:  # exchanges were spent, too
            steps = min(steps, max((meter.left(end) or 0) // len(islands), 1))
        workers.run([partial(each.run, steps, first=done, total=total) for each in islands])
        meter.spend(steps * len(islands))
        done += steps
        if left is None:
            done = max(done, int((meter.share() - begin) / max(end - begin, 1e-9) * total))
        chunk = meter.next_chunk(chunk, steps, meter.seconds() - began)
        if exchange is not None and border <= done < total:
            meter.spend(exchange())
            while _border(total, exchanged) <= min(done, total - 1):
                exchanged += 1
        yield min(island.best_cost for island in islands)


def _border(total: int, exchanged: int) -> int:
    """Return the moves after which the next exchange is due, or all if there is none left."""
    share = FIRST_EXCHANGE + (1.0 - FIRST_EXCHANGE) * exchanged / EXCHANGES
    return min(math.ceil(total * share), total)


def continue_from_best(islands: Sequence[StepTimeAnnealing]) -> int:
    """Let all islands continue from the best placement; return the evaluations spent on it."""
    best = min(islands, key=lambda island: island.best_cost)
    others = [island for island in islands if island.best_cost > best.best_cost]
    for island in others:
        island.adopt(best)
    return len(others)
