"""The forward call that each op of a graph belongs to, and runs with."""

from __future__ import annotations

from graphs.extract import Extraction
from graphs.graph import PHASES, GraphArrays


def call_keys(extraction: Extraction, graph: GraphArrays) -> tuple[str, ...]:
    """Return the key of each op's forward call, (N,).

    For a step that was not exported, the key is the id of the op's forward op. ``graph`` has the
    ops or the calls of the extraction.
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
    module, _, op = op_id.rpartition(":")
    return f"{module}:{op.removeprefix(f'{PHASES[phase]}/')}"
