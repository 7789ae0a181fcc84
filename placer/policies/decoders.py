"""Costs of scheduler weights during training, decoded in this process, in several or by Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, OVERFULL_NS
from placer.ray_cluster.connection import RayCluster, check_deaths
from placer.search.evaluator import Evaluator


class Decoders(Protocol):
    """Evaluates scheduler weights on problems, by their step times in nanoseconds."""

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """Return costs (B,) of ``weights`` (B, K) decoded on the problems ``numbers`` (B,)."""
        ...

    def close(self) -> None:
        """Release processes and connections."""
        ...


class InProcess:
    """Decodes in this process."""

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        self.evaluators = evaluators

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """See :class:`Decoders`."""
        costs = np.array(
            [
                self.evaluators[number].decode(row[None])[2][0]
                for number, row in zip(numbers, weights, strict=True)
            ],
            np.int64,
        )
        return np.where(costs < OVERFULL_NS, costs, INFEASIBLE_NS)

    def close(self) -> None:
        """Do nothing."""


class Processes:
    """Decodes in processes of this machine, which are restarted when one dies.

    They are spawned: a script that trains must do so under ``if __name__ == "__main__"``.
    """

    def __init__(self, evaluators: Sequence[Evaluator], count: int) -> None:
        self.problems = [evaluator.problem for evaluator in evaluators]
        self.count = count
        self._executor = self._started()

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """See :class:`Decoders`."""
        parts = np.array_split(np.arange(len(numbers)), self.count)
        deaths = 0
        while True:
            try:
                tasks = [
                    self._executor.submit(_costs, numbers[part], weights[part]) for part in parts
                ]
                return np.concatenate([task.result() for task in tasks])
            except BrokenProcessPool as error:
                deaths += 1
                self.close()
                check_deaths(deaths, error, "processes that decode", f"{self.count} of them")
                self._executor = self._started()

    def close(self) -> None:
        """Stop the processes."""
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


_decoder: list[InProcess] = []
"""In a worker process: its decoder."""


def _begin(problems: list[Problem]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _decoder.append(_decoder_of(problems))


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """Exit when the parent is gone, which cannot say so when it is killed."""
    parent.join()
    os._exit(0)


def _costs(numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    return _decoder[0].costs(numbers, weights)


class RayTasks:
    """Decodes on all processors of a Ray cluster, one task for each (extra: cluster)."""

    def __init__(self, evaluators: Sequence[Evaluator], address: str = "") -> None:
        """Connect to a cluster, see :class:`placer.ray_cluster.connection.RayCluster`."""
        self._cluster = RayCluster(address)
        problems = [evaluator.problem for evaluator in evaluators]
        self._problems = self._cluster.share(problems, _decoder_of)

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """See :class:`Decoders`."""
        count = max(self._cluster.processors, 1)
        parts = [part for part in np.array_split(np.arange(len(numbers)), count) if len(part)]
        tasks = [(numbers[part], weights[part]) for part in parts]
        found = self._cluster.run(InProcess.costs, self._problems, tasks)
        return np.concatenate([costs for costs in found if costs is not None])  # all of them

    def close(self) -> None:
        """Disconnect; a cluster started by this instance ends."""
        self._cluster.close()


def _decoder_of(problems: Sequence[Problem]) -> InProcess:
    return InProcess([Evaluator(problem) for problem in problems])
