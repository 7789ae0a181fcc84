"""Threads that evaluate placements side by side.

Compiled code releases the interpreter lock, and a search spends its time there. All else stays in
the thread of the search, which hands out the same work whichever worker is faster. So a result
depends on the number of workers, but on no clock unless the budget is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Final, TypeVar

import numpy as np

from envs.problem import Floats, Ints, Longs
from placer.search.evaluator import Evaluator

T = TypeVar("T")

FEWEST_PAIRS: Final = 20_000
"""Pairs of op and device in all decodes for which it pays to divide them, about 0.5 ms."""


class Workers:
    """The thread of the search and ``count - 1`` more, which end with the context."""

    def __init__(self, count: int = 1) -> None:
        """Start no thread before it has work."""
        self.count = count
        self._threads = ThreadPoolExecutor(count - 1, "search") if count > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run at most ``count`` tasks at once; return their results.

        An error is raised when no task is running any more: that of the first in their order.
        """
        assert 1 <= len(tasks) <= self.count
        futures: list[Future[T]] = []
        if self._threads is not None:
            futures = [self._threads.submit(task) for task in tasks[1:]]
        try:
            first = tasks[0]()
        finally:
            wait(futures)
        return [first, *(future.result() for future in futures)]


class Team:
    """An evaluator for each worker; all see the plan that the first one looks at."""

    def __init__(self, evaluator: Evaluator, workers: Workers) -> None:
        """Make no copy of the evaluator before it is needed."""
        self.workers = workers
        self._evaluators = [evaluator]

    def evaluators(self, count: int) -> list[Evaluator]:
        """Return the evaluators of the first ``count`` workers."""
        while len(self._evaluators) < count:
            self._evaluators.append(self._evaluators[0].twin())
        return self._evaluators[:count]

    def decode(self, weights: Floats) -> tuple[Ints, Floats, Longs]:
        """Decode weights as :meth:`Evaluator.decode` does, with the same result."""
        [first] = self.evaluators(1)
        count = min(len(weights), self.workers.count)
        if count == 1 or len(weights) * first.scheduling.cost.size < FEWEST_PAIRS:
            return first.decode(weights)
        parts = zip(self.evaluators(count), np.array_split(weights, count), strict=True)
        found = self.workers.run([partial(each.decode, rows) for each, rows in parts])
        devices, priority, costs = zip(*found, strict=True)
        return np.concatenate(devices), np.concatenate(priority), np.concatenate(costs)
