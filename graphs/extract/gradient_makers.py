"""Ops of a traced step that produce the gradients of its parameters, according to its program."""

from __future__ import annotations

from collections import defaultdict

from graphs.extract.call_graph import CallGraph
from graphs.extract.extraction import Extraction
from graphs.extract.program import VIEW


def gradient_makers(
    extraction: Extraction, calls: CallGraph | None = None
) -> dict[str, tuple[str, ...]]:
    """Return {op that parameters live with: ops that produce their gradients}, by id.

    It is empty without a program. A parameter lives with the first op that reads it. With
    ``calls``, ids are those of the nodes that the ops are in.
    """
    program = extraction.own_program
    if program is None:
        return {}
    ids = tuple(extraction.graph)
    if calls is not None:
        nodes = tuple(calls.graph)
        ids = tuple(nodes[node] for node in calls.node_of.tolist())
    names = {s.value: s.name for s in program.sources if s.role == "parameter"}
    home: dict[str, int] = {}
    for call in program.calls:
        if call.op == VIEW:
            continue
        for root in (program.values[value].root for value in call.reads):
            if root in names:
                home.setdefault(program.ties.get(names[root], names[root]), call.op)
    producer = program.producers()
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name, value in program.gradients.items():
        own = home.get(program.ties.get(name, name))
        made = producer.get(program.values[value].root)
        if own is not None and made is not None and program.calls[made].op != VIEW:
            found[ids[own]][ids[program.calls[made].op]] = None
    return {op_id: tuple(makers) for op_id, makers in found.items()}
