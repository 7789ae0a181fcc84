"""Blocks of ops that annealing moves as one on large graphs, where single ops are too many.

A labelling puts every op into one block. Some follow the names of modules, so that all calls of a
layer, in every micro-batch, forward and backward, are one block. Others contract the edges with the
most bytes until a block has its share of the work. Blocks only say what moves together: no op needs
to stay with its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from envs.compiled import by_pointer, compiled_borrowing
from envs.problem import Floats, Ints, Longs, Problem

CLUSTERS: Final = (16, 64, 256)
"""Sizes of clusters in average ops: as much work as so many ops at most."""
FEWEST_CLUSTERS: Final = 4


@by_pointer
class Blocks(NamedTuple):
    """L labellings of N ops; block members are ``members[l, first[l, i]:end[l, i]]``."""

    first: Ints  # (L, N)
    end: Ints  # (L, N)
    members: Ints  # (L, N)


def no_blocks() -> Blocks:
    """Return no labelling."""
    return Blocks(*(np.zeros((0, 0), np.int32) for _ in range(3)))


def blocks_of(problem: Problem, *, sizes: Sequence[int] = CLUSTERS) -> Blocks:
    """Return the labellings of a problem; clusters have at most the work of ``sizes`` mean ops.

    No cluster has more work than a device on average, no module more than twice that.
    """
    cost = problem.cheapest_ns().astype(np.float64) + 1.0
    share = float(cost.sum()) / problem.device_count
    labels = _by_module(problem, cost, 2.0 * share)
    for size in sizes:
        if FEWEST_CLUSTERS * size <= problem.op_count:
            labels.append(_clusters(problem, cost, min(size * float(cost.mean()), share)))
    if not labels:
        return no_blocks()
    first, end, members = zip(*map(_row, labels), strict=True)
    return Blocks(np.stack(first), np.stack(end), np.stack(members))


def _row(label: Longs) -> tuple[Ints, Ints, Ints]:
    """Return, of one labelling, where the block of each op begins and ends, and the members."""
    _, label, sizes = np.unique(label, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    members = np.argsort(label, kind="stable")
    first, end = (ends - sizes)[label], ends[label]
    return first.astype(np.int32), end.astype(np.int32), members.astype(np.int32)


def _by_module(problem: Problem, cost: Floats, most: float) -> list[Longs]:
    """Return labellings by module, its parent and so on while they have work of ``most`` at most.

    Coarsest first.
    """
    paths = [module.split(".") for module in problem.graph.modules]
    found: list[Longs] = []
    for depth in range(max(map(len, paths)), 0, -1):
        names = [".".join(path[:depth]) for path in paths]
        label = np.asarray(np.unique(names, return_inverse=True)[1], np.int64)
        if int(label.max()) == 0 or np.bincount(label, cost).max() > most:
            break
        if int(label.max()) < problem.op_count - 1 and not (found and (label == found[0]).all()):
            found.insert(0, label)
    return found


def _clusters(problem: Problem, cost: Floats, most: float) -> Longs:
    graph = problem.graph
    source = np.repeat(np.arange(len(graph)), np.diff(graph.successor_start)).astype(np.int32)
    order = np.argsort(-graph.edge_bytes, kind="stable")
    root = np.arange(len(graph), dtype=np.int32)
    _contract(source, np.array(graph.successors, np.int32), order, cost.copy(), most, root)
    return root.astype(np.int64)


@compiled_borrowing
def _contract(
    source: Ints, target: Ints, order: Longs, work: Floats, most: float, root: Ints
) -> None:
    """Join the ends of edges in ``order`` while the ``work`` of a cluster is at most ``most``."""
    for k in range(len(order)):
        a, b = source[order[k]], target[order[k]]
        while root[a] != a:
            root[a] = root[root[a]]
            a = root[a]
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        if a != b and work[a] + work[b] <= most:
            a, b = min(a, b), max(a, b)
            root[b] = a
            work[a] += work[b]
    for i in range(len(root)):
        a = i
        while root[a] != a:
            a = root[a]
        root[i] = a
