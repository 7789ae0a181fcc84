"""Meaning of the inputs and outputs of a graph of AOTAutograd, by its descriptors of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch

from graphs.extract.errors import wants_input_gradient, writes_constant, writes_input
from graphs.extract.program import ResultRole, Role
from graphs.workload import ExtractionError, unwrapped

INPUTS: Final[dict[str, Role]] = {
    "ParamAOTInput": "parameter",
    "BufferAOTInput": "buffer",
    "PlainAOTInput": "input",
    "TangentAOTInput": "tangent",
}
OUTPUTS: Final[dict[str, tuple[ResultRole, str]]] = {
    "PlainAOTOutput": ("output", ""),
    "GradAOTOutput": ("gradient", "grad_of"),
    "InputMutationAOTOutput": ("state", "mutated_input"),
}
"""{kind of descriptor: role of the result, attribute that describes its input}."""


def input_of(
    description: Any, leaves: Sequence[Any], constants: Collection[str]
) -> tuple[Role, str]:
    """Return the role and name of a described input.

    ``leaves`` are those of all inputs of the step; ``constants`` the paths of buffers that are none
    of the model.
    """
    kind = type(description).__name__
    if kind not in INPUTS:
        raise ExtractionError(f"the traced step takes an input of kind {kind}, which no step has")
    match role := INPUTS[kind]:
        case "buffer" if description.target in constants:
            return "constant", description.target
        case "parameter" | "buffer":
            return role, unwrapped(description.target)
        case "input":
            before = leaves[: description.idx]
            return role, str(sum(isinstance(leaf, torch.Tensor) for leaf in before))
    return role, ""


def output_of(
    description: Any, leaves: Sequence[Any], constants: Collection[str]
) -> tuple[ResultRole, str]:
    """Return the role and name of a described output, see :func:`input_of`."""
    kind = type(description).__name__
    if kind not in OUTPUTS:
        raise ExtractionError(f"the traced step gives an output of kind {kind}")
    role, attribute = OUTPUTS[kind]
    if role == "output":
        return role, str(description.idx)
    of, name = input_of(getattr(description, attribute), leaves, constants)
    if of == "constant":
        raise writes_constant(unwrapped(name))
    if of == "input" and role == "gradient":
        raise wants_input_gradient(name)
    if of == "input":
        raise writes_input(f"tensor {name} of its inputs")
    return role, name


def is_output(description: Any) -> bool:
    """Return whether an output is one of the step itself."""
    return type(description).__name__ == "PlainAOTOutput"
