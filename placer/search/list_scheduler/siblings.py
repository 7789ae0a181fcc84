"""Siblings of an op: the other inputs of its consumers, which it should be near to."""

from __future__ import annotations

from typing import Final

import numpy as np

from envs.problem import Ints

MOST_CONSUMERS: Final = 4
MOST_INPUTS: Final = 4


def sibling_edges(
    successor_start: Ints, successors: Ints, predecessor_start: Ints, predecessors: Ints
) -> tuple[Ints, Ints]:
    """Return where the siblings of each op begin (N + 1,), and the edges from them (S,).

    Edges are numbered by target. Only the first 4 inputs of the first 4 consumers count.
    """
    fan_out = np.diff(successor_start)
    place = np.arange(len(successors)) - np.repeat(successor_start[:-1], fan_out)
    ops = np.repeat(np.arange(len(fan_out)), fan_out)[place < MOST_CONSUMERS]
    consumers = successors[place < MOST_CONSUMERS]
    sizes = np.minimum(np.diff(predecessor_start)[consumers], MOST_INPUTS)
    edges = np.arange(sizes.sum())
    edges += np.repeat(predecessor_start[consumers] - (np.cumsum(sizes) - sizes), sizes)
    ops = np.repeat(ops, sizes)
    is_other = predecessors[edges] != ops
    start = np.zeros(len(fan_out) + 1, np.int32)
    start[1:] = np.cumsum(np.bincount(ops[is_other], minlength=len(fan_out)))
    return start, edges[is_other].astype(np.int32)
