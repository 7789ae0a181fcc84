"""Lookup of backends by name."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from envs.backend import Backend
from envs.problem import Problem
from envs.runtime import Runtime
from envs.simulator import Simulated
from graphs.names import suggestion

BACKENDS: Final = ("simulated", "measured")


def backend_named(
    name: str,
    problem: Problem,
    runtime: Runtime | None,
    *,
    rounds: int,
    until_closed: ExitStack,
) -> Backend:
    """Return the backend with this name.

    Args:
        name: "simulated", or "measured", which runs the model.
        problem: the problem whose placements are evaluated.
        runtime: what runs the model behind the problem, if there is one.
        rounds: counted runs of every measured placement.
        until_closed: exit stack that closes what is started here.

    Raises:
        ValueError: the name is unknown, or there is no model to run.
        WorkerError: a worker did not start.
        OSError: there is too little memory, or too many processes or open files.
    """
    if name not in BACKENDS:
        raise ValueError(
            f"there is no backend {name!r}, there are {', '.join(BACKENDS)}, and any object with a "
            f"method evaluate{suggestion(name, BACKENDS)}"
        )
    if name == "simulated":
        return Simulated(problem)
    if runtime is None:
        raise ValueError('backend "measured" runs a model: give a workload, not a graph')
    measured = runtime.backend(problem, rounds=rounds)
    until_closed.callback(measured.close)
    return measured
