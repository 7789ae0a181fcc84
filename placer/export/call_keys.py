"""Which call of the forward pass an op of a graph belongs to: it runs where the call does."""

from __future__ import annotations

from graphs.extract import Extraction
from graphs.graph import PHASES, GraphArrays


def call_keys(extraction: Extraction, graph: GraphArrays) -> tuple[str, ...]:
    """The key of the call of every op, (N,); of a step that was not exported its forward op's id.

    ``graph`` is of the ops of the extraction, or of its calls.
    """
    own = tuple(extraction.graph)
    if graph.ids == own and extraction.own_forward is not None:
        return extraction.call_of
    if graph.ids == own:
        return tuple(
            own[i if source is None else source] for i, source in enumerate(extraction.forward_of)
        )
    return tuple(map(_forward_id, graph.ids, graph.phase.tolist()))


def _forward_id(op_id: str, phase: int) -> str:
    """The id of the forward op of a call."""
    module, _, op = op_id.rpartition(":")
    return f"{module}:{op.removeprefix(f'{PHASES[phase]}/')}"
