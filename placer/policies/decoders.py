"""Who decodes weights to costs while a policy learns: this process, or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from placer.search.judge import Judge

MOST_RESTARTS: Final = 5
"""In a row, of processes that die."""


class Decoders(Protocol):
    """Says what weights cost on problems, whichever machine finds out: always the same."""

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """Costs (B,) of what ``weights`` (B, K) decode to on the problems ``numbers`` (B,)."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Here:
    """Decodes in this process."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self.judges = judges

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """See :class:`Decoders`."""
        return np.array(
            [
                self.judges[number].decoded(row[None])[2][0]
                for number, row in zip(numbers, weights, strict=True)
            ],
            np.int64,
        )

    def close(self) -> None:
        """Nothing was started."""


class Processes:
    """Decodes in processes of this machine, which are started anew when one dies.

    They are spawned: a script that trains must do so under ``if __name__ == "__main__"``.
    """

    def __init__(self, judges: Sequence[Judge], count: int) -> None:
        self.problems = [judge.problem for judge in judges]
        self.count = count
        self._executor = self._started()

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """See :class:`Decoders`.

        Raises:
            OSError: processes die again and again, or cannot be started.
        """
        parts = np.array_split(np.arange(len(numbers)), self.count)
        for _ in range(MOST_RESTARTS):
            try:
                tasks = [
                    self._executor.submit(_costs, numbers[part], weights[part]) for part in parts
                ]
                return np.concatenate([task.result() for task in tasks])
            except BrokenProcessPool:
                self.close()
                self._executor = self._started()
        raise OSError(
            f"processes that decode died {MOST_RESTARTS} times in a row: is there memory for "
            f"{self.count} of them?"
        )

    def close(self) -> None:
        """End the processes."""
        self._executor.shutdown(cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        try:
            return ProcessPoolExecutor(
                self.count,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self.problems,),
            )
        except OSError as error:
            raise OSError(
                f"{self.count} processes that decode cannot be started: {error}; they need "
                "semaphores in /dev/shm and a few open files each. Train with workers = 0"
            ) from error


_own: list[Here] = []
"""Of a process that was started to decode: what it decodes with."""


def _begin(problems: list[Problem]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _own.append(Here([Judge(problem) for problem in problems]))


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """Leave when the parent is gone: one that was killed tells nobody."""
    parent.join()
    os._exit(0)


def _costs(numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    return _own[0].costs(numbers, weights)
