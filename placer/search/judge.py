"""Judges plans by the simulator, many at once, with what does not fit ranked by how much."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing
from envs.problem import Problem
from envs.simulator import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    RECORD_EXCESS,
    ProblemArrays,
    Workspace,
    arrays_of,
    simulate_core,
    workspace_for,
)
from envs.simulator.arrays import HORIZON_NS
from placer.search.candidate import Candidate
from placer.search.decoder import decode_batch
from placer.search.outline import outline

OVERFULL_NS: Final = HORIZON_NS
"""Costs from here on are plans that need too much memory: more, the more they need."""
LARGEST_SHARE: Final = 1000.0


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

    def costs(self, devices: NDArray[np.int32], priority: NDArray[np.float64]) -> NDArray[np.int64]:
        """Costs (B,) of the plans ``devices`` (B, N) with ``priority`` (B, N)."""
        costs = np.empty(len(devices), np.int64)
        devices = np.array(devices, np.int32, order="C")
        priority = np.array(priority, np.float64, order="C")
        for row in range(len(devices)):
            costs[row] = plan_cost(
                self.arrays,
                self.work,
                devices[row],
                priority[row],
                NO_LIMIT_NS,
                self.outline.memory_matters,
            )
        return costs

    def decoded(
        self, weights: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int64]]:
        """Devices (B, N), priorities (B, N) and costs (B,) that weights (B, 21) decode to."""
        devices, priority = decode_batch(self.outline, weights)
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


@compiled_borrowing
def plan_cost(
    arrays: ProblemArrays,
    work: Workspace,
    devices: NDArray[np.int32],
    priority: NDArray[np.float64],
    limit: int,
    memory_matters: bool,
) -> int:
    """Cost of one plan if it is at most ``limit``, else some number above it."""
    memory = RECORD_EXCESS if memory_matters else IGNORE_MEMORY
    cost = simulate_core(arrays, work, devices, priority, limit, memory)
    if not memory_matters or cost > limit:
        return cost
    missing = 0.0
    room = 0.0
    for d in range(len(arrays.memory_bytes)):
        missing += max(0, work.devices[d].peak_bytes - arrays.memory_bytes[d])
        room += arrays.memory_bytes[d]
    if missing == 0.0:
        return cost
    share = min(missing / max(room, 1.0), LARGEST_SHARE)
    return OVERFULL_NS + int(share * OVERFULL_NS)
