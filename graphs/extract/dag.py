"""Building the placeable DAG of a step from its program and the facts of its ops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import networkx as nx

from graphs.extract.colocation import colocation_groups
from graphs.extract.convert import OpFacts
from graphs.extract.keys import Homes, numbered
from graphs.extract.program import VIEW, Call, Ref, StepProgram
from graphs.graph import add_edge, add_op, new_graph

LOOKUPS: Final = frozenset(
    f"aten.{name}"
    for name in ("embedding.default", "gather.default", "index.Tensor", "index_select.default")
)
"""Operators that read only the parts of their first argument that they return."""


def build_graph(program: StepProgram, facts: Sequence[OpFacts], name: str) -> nx.DiGraph[str]:
    """Build the DAG of a program, without costs; its ``i``-th node is op ``i``.

    Bytes of an edge are those of the tensors (not of views of them) that the target reads.

    A parameter's gradient counts once: as ``gradient_bytes`` of the first op that reads the
    parameter, with or without optimizer. ``output_bytes`` of the op that makes it exclude it,
    unless something else in the backward pass reads it; then autograd copies it. A parameter that
    no op reads counts with an op of its module, see :class:`Homes`.
    """
    sizes = _Sizes(program, facts)
    ids = op_ids(facts)
    groups = colocation_groups(program, facts, ids)
    graph = new_graph(name)
    for i, op in enumerate(facts):
        add_op(
            graph,
            ids[i],
            cost_s={},
            op=op.name,
            phase=op.phase,
            module=op.module,
            flops=op.flops,
            moved_bytes=sizes.moved[i],
            output_bytes=sizes.output[i],
            parameter_bytes=sizes.parameter[i],
            gradient_bytes=sizes.gradient[i],
            optimizer_bytes=sizes.optimizer[i],
            saved_bytes=sizes.saved[i],
            colocate=groups.get(i),
        )
    for (source, target), roots in sizes.edges.items():
        add_edge(graph, ids[source], ids[target], sum(roots.values()))
    return graph


def op_ids(facts: Sequence[OpFacts]) -> list[str]:
    """Return stable keys ``module[@call]:[backward/]op[#occurrence]``."""
    return numbered(
        f"{op.call_key}:{'' if op.phase == 'forward' else f'{op.phase}/'}{op.name}" for op in facts
    )


class _Sizes:
    """Bytes that ops write, read, own and keep, and bytes on the edges between them."""

    def __init__(self, program: StepProgram, facts: Sequence[OpFacts]) -> None:
        self.output: Counter[int] = Counter()
        self.moved: Counter[int] = Counter()
        self.saved: Counter[int] = Counter()
        self.parameter: Counter[int] = Counter()
        self.gradient: Counter[int] = Counter()
        self.optimizer: Counter[int] = Counter()
        self.edges: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        producer = program.producers()
        parameters = {s.value: s.name for s in program.sources if s.role == "parameter"}
        homeless = {program.ties.get(name, name) for name in parameters.values()}
        # The new value of a buffer replaces the old one, so nothing more is kept.
        saved = {program.values[r.value].root for r in program.results if r.role == "state"}
        trained = {program.ties.get(name, name) for name in program.gradients}
        gradients = _only_gradients(program, facts)
        kept = {s.value for s in program.sources if s.role in ("optimizer", "step_count")}
        for call in program.calls:
            if call.op == VIEW:
                continue
            for value in (*(v for v in call.outputs if v is not None), *call.writes):
                self.moved[call.op] += program.values[value].size_bytes
                if value not in gradients and value not in call.writes:
                    self.output[call.op] += program.values[value].size_bytes
            for root in dict.fromkeys(program.values[value].root for value in call.reads):
                size = program.values[root].size_bytes
                self.moved[call.op] += _read_bytes(program, call, root)
                if root in producer:
                    source = program.calls[producer[root]].op
                    self.edges[source, call.op][root] = size
                    phases = facts[source].phase, facts[call.op].phase
                    if phases == ("forward", "backward") and root not in saved:
                        saved.add(root)
                        self.saved[source] += size
                elif root in parameters:
                    name = program.ties.get(parameters[root], parameters[root])
                    if name in homeless:
                        homeless.remove(name)
                        self.parameter[call.op] += size
                        self.gradient[call.op] += size if name in trained else 0
                elif root in kept:
                    self.optimizer[call.op] += size
            if call.shows_part:
                self.moved[call.op] = 0
        homes = Homes((i, op.module) for i, op in enumerate(facts))
        for value, name in parameters.items():
            if name in homeless:
                self.parameter[homes.of(name)] += program.values[value].size_bytes


def _read_bytes(program: StepProgram, call: Call, root: int) -> int:
    """Return the bytes that a call reads of the tensor ``root``: views of it, or looked-up rows."""
    views = [program.values[value] for value in call.reads if program.values[value].root == root]
    read = min(sum(view.size_bytes for view in views), program.values[root].size_bytes)
    table = call.args[0] if call.target in LOOKUPS else None
    if isinstance(table, Ref) and program.values[table.value].root == root:
        return min(read, sum(program.values[v].size_bytes for v in call.outputs if v is not None))
    return read


def _only_gradients(program: StepProgram, facts: Sequence[OpFacts]) -> set[int]:
    """Return gradients of parameters that nothing but the optimizer, if there is one, reads."""
    read = {
        program.values[value].root
        for call in program.calls
        if call.op != VIEW and facts[call.op].phase != "optimizer"
        for value in call.reads
    }
    return {program.values[value].root for value in program.gradients.values()} - read
