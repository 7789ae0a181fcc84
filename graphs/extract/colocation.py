"""Ops of a step that must share a device because they share state.

Four reasons: a view of a part shares its tensor's storage; ops read or write the same buffer that
the step updates (BatchNorm statistics of a module that is called twice); they read one parameter
that has several names (tied weights); or they read one that the step's optimizer updates. Such a
parameter has one home, where all its readers run with its update: read elsewhere it would have to
be sent there after every update, which no edge of the graph stands for. Other views and members of
tuples need no group, because they are not ops (see program.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from graphs.extract.convert import OpFacts
from graphs.extract.program import VIEW, StepProgram


def colocation_groups(
    program: StepProgram, facts: Sequence[OpFacts], ids: Sequence[str]
) -> dict[int, str]:
    """Return {op: group id} for ops in groups of two or more; the id names the shared state.

    ``ids`` are the keys of the ops, (N,).
    """
    parent = list(range(program.op_count))
    names: dict[int, str] = {}
    together = [
        *_parts(program, ids),
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
    producer = program.producers()
    for call in program.calls:
        if call.op != VIEW and call.shows_part:
            home = program.calls[producer[program.values[call.reads[0]].root]].op
            yield f"tensor of {ids[home]}", {home, call.op}


def _mutated_state(
    program: StepProgram, facts: Sequence[OpFacts]
) -> Iterable[tuple[str, set[int]]]:
    readers = _forward_readers(program, facts)
    producer = program.producers()
    values = {s.name: s.value for s in program.sources if s.role in ("parameter", "buffer")}
    for result in program.results:
        root = program.values[result.value].root
        if result.role != "state" or root not in producer:
            continue
        writer = program.calls[producer[root]].op
        first = readers[values[result.name]] | {writer}
        between = _between(program, first, writer)
        if len(ops := first | between) > 1:
            yield f"state {result.name}", ops


def _tied_parameters(
    program: StepProgram, facts: Sequence[OpFacts]
) -> Iterable[tuple[str, set[int]]]:
    readers = _forward_readers(program, facts)
    shared = set(program.ties.values())
    together: defaultdict[str, set[int]] = defaultdict(set)
    for source in program.sources:
        name = program.ties.get(source.name, source.name)
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
    for call in program.calls:
        if call.op != VIEW and facts[call.op].phase == "forward":
            for value in call.reads:
                readers[program.values[value].root].add(call.op)
    return readers


def _between(program: StepProgram, first: set[int], last: int) -> set[int]:
    """Return ops on a path of calls from any of ``first`` to ``last``, for chains of updates."""
    if first == {last}:
        return set()
    below: set[int] = set(first)
    inputs: defaultdict[int, set[int]] = defaultdict(set)
    producer = program.producers()
    for call in program.calls:
        if call.op == VIEW:
            continue
        roots = (program.values[value].root for value in call.reads)
        sources = {program.calls[producer[root]].op for root in roots if root in producer}
        inputs[call.op] |= sources
        if sources & below:
            below.add(call.op)
    found: set[int] = set()
    queue = [last]
    while queue:
        op = queue.pop()
        for source in inputs[op] & below - found:
            found.add(source)
            queue.append(source)
    return found


def _find(parent: list[int], op: int) -> int:
    while parent[op] != op:
        parent[op] = parent[parent[op]]
        op = parent[op]
    return op
