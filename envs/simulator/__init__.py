"""Event-driven simulation of one step: exact, deterministic, compiled.

:class:`Simulator` simulates arrays of placements, :class:`Simulated` is the backend. Compiled code
calls :func:`simulate_core` with the named tuples of :func:`arrays_of` and :func:`workspace_for`.
``envs.simulator.kernel.step`` describes the semantics.
"""

from envs.simulator.kernel.arrays import (
    BEYOND_HORIZON,
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    OVERFULL_NS,
    RANK_EXCESS,
    RECORD_MEMORY,
    STOP_WHEN_FULL,
    ProblemArrays,
    Workspace,
)
from envs.simulator.kernel.step import simulate_batch, simulate_core
from envs.simulator.kernel.tables import arrays_of, workspace_for
from envs.simulator.schedule import Schedule, Transfers
from envs.simulator.simulated import Simulated, Simulator

__all__ = [
    "BEYOND_HORIZON",
    "IGNORE_MEMORY",
    "INFEASIBLE_NS",
    "NO_LIMIT_NS",
    "OVERFULL_NS",
    "RANK_EXCESS",
    "RECORD_MEMORY",
    "STOP_WHEN_FULL",
    "ProblemArrays",
    "Schedule",
    "Simulated",
    "Simulator",
    "Transfers",
    "Workspace",
    "arrays_of",
    "simulate_batch",
    "simulate_core",
    "workspace_for",
]
