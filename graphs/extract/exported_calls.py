"""The call of the exported forward pass that each op belongs to, and whose device it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from graphs.extract.convert import OpFacts
from graphs.extract.forward import ForwardProgram
from graphs.extract.program import VIEW, StepProgram


def calls_of(
    program: StepProgram, facts: Sequence[OpFacts], forward: ForwardProgram
) -> tuple[str, ...]:
    """Return the key of the call of every op, (N,).

    Torch passes it on for nearly all. Of the others, ops that differentiate a forward op belong to
    its call. Ops that add up gradients of one tensor belong, as in autograd, to the call that made
    the tensor; those of a parameter, and its update, to the call that reads it first.
    """
    homes = _homes(program, forward)
    found = [op.stems_from or homes.get(i) for i, op in enumerate(facts)]
    for i, op in enumerate(facts):
        if found[i] is None and op.forward_op is not None:
            found[i] = found[op.forward_op]
    inputs, readers = _neighbours(program)
    for i in reversed(range(len(found))):
        found[i] = found[i] or next((found[reader] for reader in readers[i]), None)
    for i in range(len(found)):
        found[i] = found[i] or next((found[source] for source in inputs[i]), None)
    fallback = forward.calls[0].key
    return tuple(key or fallback for key in found)


def _neighbours(
    program: StepProgram,
) -> tuple[defaultdict[int, list[int]], defaultdict[int, list[int]]]:
    inputs: defaultdict[int, list[int]] = defaultdict(list)
    readers: defaultdict[int, list[int]] = defaultdict(list)
    producer = program.producers()
    for call in program.calls:
        for value in call.reads if call.op != VIEW else ():
            root = program.values[value].root
            if root in producer:
                source = program.calls[producer[root]].op
                inputs[call.op].append(source)
                readers[source].append(call.op)
    return inputs, readers


def _homes(program: StepProgram, forward: ForwardProgram) -> dict[int, str]:
    """Return {op that makes a gradient or updates a parameter: first call that reads it}."""
    reader = forward.first_readers()
    home = {
        program.ties.get(s.name, s.name): reader[s.value]
        for s in forward.sources
        if s.value in reader
    }
    producer = program.producers()
    found: dict[int, str] = {}
    for own_name, value in program.gradients.items():
        root, name = program.values[value].root, program.ties.get(own_name, own_name)
        if root in producer and name in home:
            found[program.calls[producer[root]].op] = home[name]
    for op, own_name in program.updates().items():
        if (name := program.ties.get(own_name, own_name)) in home:
            found[op] = home[name]
    return found
