"""Lookup of backends by name."""

from __future__ import annotations

import difflib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from envs.backend import Backend
from envs.problem import Problem
from envs.simulator import Simulated

if TYPE_CHECKING:
    from envs.model_problem import ModelProblem

BACKENDS: Final = ("simulated", "measured")


def backend_named(
    name: str,
    problem: Problem,
    model: ModelProblem | None,
    *,
    rounds: int,
    overlap: bool = False,
    until_closed: ExitStack,
) -> Backend:
    """Return the backend with this name.

    Args:
        name: "simulated", or "measured", which runs the model.
        problem: the problem whose placements are evaluated.
        model: the model behind the problem, if there is one.
        rounds: counted runs of every measured placement.
        overlap: overlap copies with compute in measured runs.
        until_closed: exit stack that closes what is started here.

    Raises:
        ValueError: the name is unknown, there is no model to run, or copies cannot overlap.
        WorkerError: a worker did not start.
        OSError: there is too little memory, or too many processes or open files.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"there is no backend {name!r}, there are {', '.join(BACKENDS)}, and any object with a "
            f"method evaluate{hint}"
        )
    if name == "simulated":
        return Simulated(problem)
    if model is None:
        raise ValueError('backend "measured" runs a model: give a workload, not a graph')
    measured = model.measured(rounds=rounds, overlap=overlap)
    until_closed.callback(measured.close)
    return measured
