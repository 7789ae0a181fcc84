"""Judges plans by the simulator, many at once, with what does not fit ranked by how much."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    OVERFULL_NS,
    RANK_EXCESS,
    ProblemArrays,
    Workspace,
    arrays_of,
    simulate_batch,
    workspace_for,
)
from placer.search.candidate import Candidate
from placer.search.decoder import decode_batch
from placer.search.live import Live, live_for
from placer.search.outline import outline


class Judge:
    """The cost of plans of one problem. One instance serves one thread.

    A cost is the simulated step in nanoseconds; OVERFULL_NS and above where memory does not
    suffice; INFEASIBLE_NS where an op is on a device that it may not use or cannot be reached.
    """

    def __init__(self, problem: Problem) -> None:
        """Prepare the problem for list scheduling and simulation."""
        self.problem = problem
        self.outline = outline(problem)
        self.arrays: ProblemArrays = arrays_of(problem)
        self.work: Workspace = workspace_for(problem)
        self.memory = RANK_EXCESS if self.outline.memory_matters else IGNORE_MEMORY

    @cached_property
    def _live(self) -> Live:
        return live_for(self.outline)

    def costs(self, devices: NDArray[np.int32], priority: NDArray[np.float64]) -> NDArray[np.int64]:
        """Costs (B,) of the plans ``devices`` (B, N) with ``priority`` (B, N)."""
        costs = np.empty(len(devices), np.int64)
        devices = np.array(devices, np.int32, order="C")
        priority = np.array(priority, np.float64, order="C")
        first = 0
        while first < len(costs):
            rows = slice(first, None)
            beyond = simulate_batch(
                self.arrays,
                self.work,
                devices[rows],
                priority[rows],
                NO_LIMIT_NS,
                self.memory,
                costs[rows],
            )
            first = len(costs) if beyond < 0 else first + beyond + 1
        return costs

    def decoded(
        self, weights: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int64]]:
        """Devices (B, N), priorities (B, N) and costs (B,) that weights (B, 21) decode to."""
        devices, priority = decode_batch(self.outline, weights, self._live)
        return devices, priority, self.costs(devices, priority)

    def candidate(
        self,
        name: str,
        devices: NDArray[np.int32],
        priority: NDArray[np.float64],
        cost: int | None = None,
    ) -> Candidate:
        """One plan, (N,) each, as a candidate that keeps read-only copies of it.

        Where its ``cost`` is known it is not found again.
        """
        if cost is None:
            cost = int(self.costs(devices[None], priority[None])[0])
        own_devices, own_priority = devices.astype(np.int32), priority.astype(np.float64)
        own_devices.setflags(write=False)
        own_priority.setflags(write=False)
        return Candidate(
            name=name,
            devices=own_devices,
            priority=own_priority,
            step_ns=cost if cost < OVERFULL_NS else INFEASIBLE_NS,
        )
