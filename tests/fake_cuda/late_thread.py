"""A thread of the host that works as late as it may, or at once; without a thread, by a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class LateThread(Executor):
    """Runs what it gets in order: when its result is wanted, or earlier, which the seed decides.

    Seed 0 is always late and 1 never.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._chance = float(seed) if seed < 2 else 0.5
        self._left: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._left

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future = _Wanted(self)
        self._left.append((future, lambda: work(*args, **named)))
        while self._left and self._random.random() < self._chance:
            self._run_one()
        return future

    def run_until(self, future: Future[Any]) -> None:
        """Run all up to the work of a future."""
        while not future.done():
            self._run_one()

    def _run_one(self) -> None:
        future, work = self._left.popleft()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the waiter's
            future.set_exception(error)


class _Wanted(Future[Any]):
    def __init__(self, thread: LateThread) -> None:
        super().__init__()
        self._thread = thread

    def result(self, timeout: float | None = None) -> Any:
        self._thread.run_until(self)
        return super().result(timeout)
