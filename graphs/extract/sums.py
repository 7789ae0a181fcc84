"""Memory of sums of gradients, which autograd adds up in place as soon as each summand exists.

A trace has an op for every addition. As separate ops, each summand would wait for its addition, and
each addition would write another tensor. Autograd adds a summand before anything else runs, so that
besides the sum only one summand takes memory at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from graphs.extract.program import VIEW, StepProgram
from graphs.frozen import frozen
from graphs.graph import GraphArrays
from graphs.mirror import ACCUMULATES


def summed_in_place(
    graph: GraphArrays, program: StepProgram, node_of: NDArray[np.int64]
) -> GraphArrays:
    """Return the graph with the memory that its ops take when autograd adds up gradients.

    In each sum the first summand is an output that stands for the sum. The others are workspace of
    the ops that make them, twice in the case of the second, since the first addition is not in
    place. Additions have no output. Unchanged are summands that other ops read, too, and sums whose
    additions are in several nodes.

    Args:
        graph: N ops.
        program: program of the graph.
        node_of: the node in which each op runs, (N,).
    """
    output, workspace = graph.output_bytes.copy(), graph.workspace_bytes.copy()
    maker = program.producers()
    for additions, summands in _sums(graph, program):
        if not summands or len(set(node_of[additions].tolist())) > 1:
            continue
        output[additions] = 0
        for number, value in enumerate(summands[1:], 1):
            op, size = program.calls[maker[value]].op, program.values[value].size_bytes
            output[op] -= size
            workspace[op] += 2 * size if number == 1 else size
    return replace(graph, output_bytes=frozen(output), workspace_bytes=frozen(workspace))


def _sums(graph: GraphArrays, program: StepProgram) -> list[tuple[list[int], list[int]]]:
    """Return for every sum the ops that add to it and, in order, the values only they read."""
    adds = [op.endswith(ACCUMULATES) for op in graph.ops]
    readers = _readers(program)
    given = {program.values[result.value].root for result in program.results}
    sums: list[tuple[list[int], list[int]]] = []
    sum_of: dict[int, int] = {}  # value made by an addition -> position in sums
    for call in program.calls:
        if call.op == VIEW or not adds[call.op]:
            continue
        read = dict.fromkeys(program.values[value].root for value in call.reads)
        at = next((sum_of[root] for root in read if root in sum_of), len(sums))
        if at == len(sums):
            sums.append(([], []))
        additions, summands = sums[at]
        additions.append(call.op)
        sum_of |= {value: at for value in call.outputs if value is not None}
        summands += [
            root
            for root in read
            if root in readers and root not in sum_of and root not in given
            if all(adds[reader] for reader in readers[root])
        ]
    return sums


def _readers(program: StepProgram) -> dict[int, set[int]]:
    """Return {computed tensor: ops that read it, or a view of it}."""
    readers: defaultdict[int, set[int]] = defaultdict(set)
    made = program.producers()
    for call in program.calls:
        for root in (program.values[value].root for value in call.reads):
            if call.op != VIEW and root in made:
                readers[root].add(call.op)
    return readers
