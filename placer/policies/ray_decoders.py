"""Decoding on several machines by Ray (extra: cluster).

Work consists of stateless tasks, so that another machine can redo those of a machine that dies,
with the same costs. Every machine must have the same version of placer installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placer.policies.decoders import InProcess
from placer.search.evaluator import Evaluator

FOREVER: Final = -1
LOOPBACK: Final = "127.0.0.1"


class RayTasks:
    """Decodes on all processors of a Ray cluster, one task for each; see :class:`Decoders`."""

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
            _start(ray)
        self._problems = ray.put([evaluator.problem for evaluator in evaluators])
        self._decode = ray.remote(num_cpus=1, max_retries=FOREVER)(_costs)

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


def _start(ray: Any) -> None:
    """Start a cluster that listens on this machine only: whoever reaches it can run code on it."""
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


def _costs(
    problems: list[Any], numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
) -> NDArray[np.int64]:
    import ray

    key = problems[0].hex()
    if key not in _known:
        _known.clear()
        _known[key] = InProcess([Evaluator(problem) for problem in ray.get(problems[0])])
    return _known[key].costs(numbers, weights)
