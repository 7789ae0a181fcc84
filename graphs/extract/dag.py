"""The placeable DAG of a step, built from its program and the facts of its ops.

Ops that share state must share a device. There are five reasons for such a co-location group: a
view of a part shares its tensor's storage; backward of a recurrent layer reads the workspace of the
kernel that ran it; ops read or write the same buffer that the step updates
(BatchNorm statistics of a module that is called twice); they read one parameter that has several
names (tied weights); or they read one that the step's optimizer updates. Such a parameter has one
home, where all its readers run with its update: read elsewhere it would have to be sent there after
every update, which no edge of the graph stands for. Other views and members of tuples need no
group, because they are not ops (see :mod:`graphs.extract.program`).

:func:`calls_of` gives the call of the exported forward pass that each op belongs to, and whose
device it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import networkx as nx

from graphs.extract.convert import OpFacts
from graphs.extract.export.forward import ForwardProgram
from graphs.extract.fx_nodes import numbered
from graphs.extract.kernels.recurrent import WORKSPACE, saves_workspace
from graphs.extract.module_calls import Homes
from graphs.extract.program import Call, Ref, StepProgram
from graphs.graph import add_edge, add_op, new_graph


def colocation_groups(
    program: StepProgram, facts: Sequence[OpFacts], ids: Sequence[str]
) -> dict[int, str]:
    """Return {op: group id} for ops in groups of two or more; the id names the shared state."""
    parent = list(range(program.op_count))
    names: dict[int, str] = {}
    together = [
        *_parts(program, ids),
        *_workspaces(program, ids),
        *_mutated_state(program, facts),
        *_tied_parameters(program, facts),
        *_updated_parameters(program),
    ]
    for name, ops in together:
        first, *rest = sorted(ops)
        for op in rest:
            parent[_find(parent, op)] = _find(parent, first)
        names.setdefault(_find(parent, first), name)
    members = defaultdict(list)
    for op in range(program.op_count):
        members[_find(parent, op)].append(op)
    return {op: names[root] for root, ops in members.items() if len(ops) > 1 for op in ops}


def _parts(program: StepProgram, ids: Sequence[str]) -> Iterable[tuple[str, set[int]]]:
    makers = program.makers()
    for call in program.op_calls:
        if call.shows_part:
            home = makers[program.values[call.reads[0]].root]
            yield f"tensor of {ids[home]}", {home, call.op}


def _workspaces(program: StepProgram, ids: Sequence[str]) -> Iterable[tuple[str, set[int]]]:
    homes = {
        call.outputs[WORKSPACE]: call.op
        for call in program.op_calls
        if saves_workspace(call.target, call.args)
    }
    for call in program.op_calls:
        for value in homes.keys() & set(call.reads):
            yield f"workspace of {ids[homes[value]]}", {homes[value], call.op}


def _mutated_state(
    program: StepProgram, facts: Sequence[OpFacts]
) -> Iterable[tuple[str, set[int]]]:
    readers = _forward_readers(program, facts)
    makers = program.makers()
    values = {s.name: s.value for s in program.sources if s.role in ("parameter", "buffer")}
    for result in program.results:
        root = program.values[result.value].root
        if result.role == "state" and root in makers:
            users = readers[values[result.name]] | {makers[root]}
            ops = users | _between(program, users, makers[root])
            if len(ops) > 1:
                yield f"state {result.name}", ops


def _tied_parameters(
    program: StepProgram, facts: Sequence[OpFacts]
) -> Iterable[tuple[str, set[int]]]:
    readers = _forward_readers(program, facts)
    shared = set(program.ties.values())
    together: defaultdict[str, set[int]] = defaultdict(set)
    for source in program.sources:
        name = program.first_name(source.name)
        if source.role == "parameter" and name in shared:
            together[name] |= readers[source.value]
    for name, ops in together.items():
        if len(ops) > 1:
            yield f"parameter {name}", ops


def _updated_parameters(program: StepProgram) -> Iterable[tuple[str, set[int]]]:
    users = program.overwritten()
    for op, name in program.updates().items():
        yield f"parameter {name}", {op, *users[op]}


def _forward_readers(program: StepProgram, facts: Sequence[OpFacts]) -> defaultdict[int, set[int]]:
    """Return {root value: forward ops that read it, directly or through views}."""
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for call in program.op_calls:
        if facts[call.op].phase == "forward":
            for root in program.roots(call.reads):
                readers[root].add(call.op)
    return readers


def _between(program: StepProgram, first: set[int], last: int) -> set[int]:
    """Return ops on a path of calls from any of ``first`` to ``last``, for chains of updates."""
    if first == {last}:
        return set()
    below = set(first)
    inputs: defaultdict[int, set[int]] = defaultdict(set)
    makers = program.makers()
    for call in program.op_calls:
        sources = {makers[root] for root in program.roots(call.reads) if root in makers}
        inputs[call.op] |= sources
        if sources & below:
            below.add(call.op)
    between: set[int] = set()
    queue = [last]
    while queue:
        new = inputs[queue.pop()] & below - between
        between |= new
        queue += new
    return between


def _find(parent: list[int], op: int) -> int:
    while parent[op] != op:
        parent[op] = parent[parent[op]]
        op = parent[op]
    return op


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
    unless something else in the backward pass reads it; then autograd copies it. Parameters,
    buffers and constants count with their first reader, unread parameters and buffers with an op of
    their module, see :class:`Homes`.
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
        values, makers = program.values, program.makers()
        state = {
            s.value: program.first_name(s.name)
            for s in program.sources
            if s.role in ("parameter", "buffer")
        }
        constants = {s.value for s in program.sources if s.role == "constant"}
        homeless = set(state.values())
        # The new value of a buffer replaces the old one, so nothing more is kept.
        saved = {values[r.value].root for r in program.results if r.role == "state"}
        trained = {program.first_name(name) for name in program.gradients}
        gradients = _only_gradients(program, facts)
        kept = {s.value for s in program.sources if s.role in ("optimizer", "step_count")}
        for call in program.op_calls:
            for value in (*call.made, *call.writes):
                self.moved[call.op] += values[value].size_bytes
                if value not in gradients and value not in call.writes:
                    self.output[call.op] += values[value].size_bytes
            for root in program.roots(call.reads):
                size = values[root].size_bytes
                self.moved[call.op] += _read_bytes(program, call, root)
                if root in makers:
                    source = makers[root]
                    self.edges[source, call.op][root] = size
                    phases = facts[source].phase, facts[call.op].phase
                    if phases == ("forward", "backward") and root not in saved:
                        saved.add(root)
                        self.saved[source] += size
                elif root in state:
                    if (name := state[root]) in homeless:
                        homeless.remove(name)
                        self.parameter[call.op] += size
                        self.gradient[call.op] += size if name in trained else 0
                elif root in constants:
                    constants.remove(root)
                    self.parameter[call.op] += size
                elif root in kept:
                    self.optimizer[call.op] += size
            if call.shows_part:
                self.moved[call.op] = 0
        homes = Homes((i, op.module) for i, op in enumerate(facts))
        for value, name in state.items():
            if name in homeless:
                homeless.remove(name)
                self.parameter[homes.of(name)] += values[value].size_bytes


def _read_bytes(program: StepProgram, call: Call, root: int) -> int:
    """Return the bytes that a call reads of the tensor ``root``: views of it, or looked-up rows."""
    views = [program.values[value] for value in call.reads if program.values[value].root == root]
    read = min(sum(view.size_bytes for view in views), program.values[root].size_bytes)
    table = call.args[0] if call.target in LOOKUPS else None
    if isinstance(table, Ref) and program.values[table.value].root == root:
        return min(read, sum(program.values[value].size_bytes for value in call.made))
    return read


def _only_gradients(program: StepProgram, facts: Sequence[OpFacts]) -> set[int]:
    """Return gradients of parameters that nothing but the optimizer, if there is one, reads."""
    read = {
        root
        for call in program.op_calls
        if facts[call.op].phase != "optimizer"
        for root in program.roots(call.reads)
    }
    return {program.values[value].root for value in program.gradients.values()} - read


def calls_of(
    program: StepProgram, facts: Sequence[OpFacts], forward: ForwardProgram
) -> tuple[str, ...]:
    """Return the key of the call of every op, (N,).

    Torch passes it on for nearly all. Of the others, ops that differentiate a forward op belong to
    its call. Ops that add up gradients of one tensor belong, as in autograd, to the call that made
    the tensor; those of a parameter, and its update, to the call that reads it first.
    """
    homes = _homes(program, forward)
    keys = [op.stems_from or homes.get(i) for i, op in enumerate(facts)]
    for i, op in enumerate(facts):
        if keys[i] is None and op.forward_op is not None:
            keys[i] = keys[op.forward_op]
    inputs, readers = _neighbours(program)
    for i in reversed(range(len(keys))):
        keys[i] = keys[i] or next((keys[reader] for reader in readers[i]), None)
    for i in range(len(keys)):
        keys[i] = keys[i] or next((keys[source] for source in inputs[i]), None)
    return tuple(key or forward.calls[0].key for key in keys)


def _neighbours(
    program: StepProgram,
) -> tuple[defaultdict[int, list[int]], defaultdict[int, list[int]]]:
    inputs: defaultdict[int, list[int]] = defaultdict(list)
    readers: defaultdict[int, list[int]] = defaultdict(list)
    makers = program.makers()
    for call in program.op_calls:
        for root in program.roots(call.reads):
            if root in makers:
                inputs[call.op].append(makers[root])
                readers[makers[root]].append(call.op)
    return inputs, readers


def _homes(program: StepProgram, forward: ForwardProgram) -> dict[int, str]:
    """Return {op that makes a gradient or updates a parameter: first call that reads it}."""
    reader = forward.first_readers()
    home = {
        program.first_name(s.name): reader[s.value] for s in forward.sources if s.value in reader
    }
    makers = program.makers()
    homes: dict[int, str] = {}
    for name, value in program.gradients.items():
        root, first = program.values[value].root, program.first_name(name)
        if root in makers and first in home:
            homes[makers[root]] = home[first]
    for op, name in program.updates().items():
        if (first := program.first_name(name)) in home:
            homes[op] = home[first]
    return homes
