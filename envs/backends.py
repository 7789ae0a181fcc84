"""Backends by name: what times placements of a problem."""

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
    """The backend of a name.

    Args:
        name: "simulated", or "measured": what runs the model.
        problem: what is placed.
        model: the model that the problem is of, if it is of one.
        rounds: how often a placement is run to be measured.
        overlap: run it with copies that overlap with compute.
        until_closed: ends what is started here.

    Raises:
        ValueError: there is no such backend, no model for it to run, or copies cannot overlap.
        WorkerError: the workers do not come up.
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
        raise ValueError(
            'backend "measured" runs a model: give model=, inputs= and, unless the model returns '
            "its own loss, loss="
        )
    measured = model.measured(rounds=rounds, overlap=overlap)
    until_closed.callback(measured.close)
    return measured
