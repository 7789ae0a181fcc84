"""Costs of scheduler weights during training, decoded in this process, in several or by Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from placer.search.evaluator import Evaluator

FOREVER: Final = -1
LOOPBACK: Final = "127.0.0.1"
MOST_RESTARTS: Final = 5
"""Maximum number of restarts in a row after a process died."""


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
        return np.array(
            [
                self.evaluators[number].decode(row[None])[2][0]
                for number, row in zip(numbers, weights, strict=True)
            ],
            np.int64,
        )

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
    _decoder.append(InProcess([Evaluator(problem) for problem in problems]))


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """Exit when the parent is gone, which cannot say so when it is killed."""
    parent.join()
    os._exit(0)


def _costs(numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    return _decoder[0].costs(numbers, weights)


class RayTasks:
    """Decodes on all processors of a Ray cluster, one task for each (extra: cluster).

    Tasks are stateless, so that another machine can redo those of a machine that dies, with the
    same costs. Every machine must have the same version of placer installed.
    """

    def __init__(self, evaluators: Sequence[Evaluator], address: str = "") -> None:
        """Connect to the cluster at ``address`` or ``$RAY_ADDRESS``, or start a local one."""
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ValueError(
                "Ray is not installed: pip install 'device-placer[cluster]'"
            ) from error
        self._ray: Any = ray
        self._connected = not ray.is_initialized()
        if self._connected and (address or "RAY_ADDRESS" in os.environ):
            ray.init(address or None, log_to_driver=False)
        elif self._connected:
            _start_ray(ray)
        self._problems = ray.put([evaluator.problem for evaluator in evaluators])
        self._decode = ray.remote(num_cpus=1, max_retries=FOREVER)(_ray_costs)

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """See :class:`Decoders`."""
        count = max(int(self._ray.cluster_resources().get("CPU", 1)), 1)
        parts = np.array_split(np.arange(len(numbers)), count)
        # In a list, so that a worker fetches the problems once and not with every task.
        tasks = [
            self._decode.remote([self._problems], numbers[part], weights[part])
            for part in parts
            if len(part)
        ]
        return np.concatenate(self._ray.get(tasks))

    def close(self) -> None:
        """Disconnect; a cluster started by this instance ends."""
        if self._connected:
            self._ray.shutdown()


def _start_ray(ray: Any) -> None:
    """Start a cluster that listens on this machine only, because its clients can run any code."""
    constants: Any = import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False  # else Ray listens on a network address
    try:
        ray.init("local", include_dashboard=False, log_to_driver=False)
    finally:
        constants.ENABLE_RAY_CLUSTER = before
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    if addresses != {LOOPBACK}:
        ray.shutdown()
        raise ConnectionError(
            f"Ray listens on {', '.join(sorted(addresses))}, where others may reach it: start a "
            "cluster yourself and give its address"
        )


_known: dict[str, InProcess] = {}
"""In a worker: its decoder, by the id of the problems; at most one entry."""


def _ray_costs(
    problems: list[Any], numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
) -> NDArray[np.int64]:
    import ray

    key = problems[0].hex()
    if key not in _known:
        _known.clear()
        _known[key] = InProcess([Evaluator(problem) for problem in ray.get(problems[0])])
    return _known[key].costs(numbers, weights)
