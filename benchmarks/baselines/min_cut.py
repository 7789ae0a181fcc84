"""Balanced parts with short transfers between them, by METIS.

Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs"
(SIAM J. Sci. Comput., 1998). A vertex is a co-location group or an op, weighted by its mean cost;
an edge is weighted by its mean transfer time; a device gets work in proportion to its speed.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import pymetis
from numpy.typing import NDArray

from envs.placement import OBJECTIVES
from graphs.coarsen.merging import edge_sources
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.grouping import Grouping, spread, units
from placer.search.heuristics import ranked_by
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.request import SearchRequest

LARGEST_WEIGHT: Final = 1 << 30
"""Maximum sum of all vertex weights, or of all edge weights: METIS may use 32-bit integers."""
TRIES: Final = 8


class MinCut:
    """The best of several METIS partitions with different seeds."""

    objectives: ClassVar[tuple[str, ...]] = OBJECTIVES

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best partition."""
        evaluator, meter, problem = Evaluator(request.problem), request.meter(), request.problem
        rows, candidates = units(problem), list[Candidate]()
        by_level = evaluator.scheduling.bottom_level
        seeds = np.random.SeedSequence(request.seed).generate_state(TRIES) >> 1  # METIS: 31 bits
        for seed in seeds.tolist():
            if candidates and meter.over():
                break
            devices = min_cut(rows, evaluator.scheduling, seed)
            candidates.append(evaluator.candidate(Kind.OTHER, devices, by_level, name="min-cut"))
            meter.spend(1)
            meter.note("min-cut", min(candidate.step_ns for candidate in candidates))
        return ranked_by(request.objective, problem, candidates)[:1]


def min_cut(rows: Grouping, scheduling: SchedulingArrays, seed: int) -> NDArray[np.int32]:
    """Return devices (N,) for the units of :func:`placer.search.grouping.units`.

    METIS does not support pins: an op that is not allowed on the device of its part goes to the
    cheapest allowed one. METIS sees an undirected graph, so parts are balanced in total, not at
    each point in time.
    """
    count, device_count = rows.cost_ns.shape
    if device_count == 1 or count == 1:
        return spread(rows.problem, np.zeros(rows.problem.op_count, np.int64))
    runs = rows.allowed.sum(axis=1)
    start, neighbours, weight = _adjacency(rows, scheduling)
    busy = np.maximum(rows.cost_ns.sum(axis=0) / np.maximum(rows.allowed.sum(axis=0), 1), 1.0)
    speed = np.where(rows.allowed.any(axis=0), 1.0 / busy, 0.0)
    _, part = pymetis.part_graph(
        device_count,
        pymetis.CSRAdjacency(start, neighbours),
        vweights=_whole(rows.cost_ns.sum(axis=1) / runs).tolist(),
        eweights=_whole(weight).tolist(),
        tpwgts=(speed / speed.sum()).tolist(),
        recursive=False,
        options=pymetis.Options(seed=seed),
    )
    return spread(rows.problem, np.array(part, np.int64)[rows.group_of])


def _adjacency(
    rows: Grouping, scheduling: SchedulingArrays
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the CSR adjacency of the units: starts, neighbours, and edge weights."""
    graph, count = rows.problem.graph, len(rows)
    edge_ns = np.empty(graph.edge_count)
    edge_ns[graph.predecessor_edge] = scheduling.edge_ns
    source, target = rows.group_of[edge_sources(graph)], rows.group_of[graph.successors]
    ends = np.concatenate([source * count + target, target * count + source])
    ends, inverse = np.unique(ends, return_inverse=True)
    weight = np.bincount(inverse, np.concatenate([edge_ns, edge_ns]), minlength=len(ends))
    between = ends // count != ends % count
    ends, weight = ends[between], weight[between]
    start = np.searchsorted(ends // count, np.arange(count + 1))
    return start, ends % count, weight


def _whole(weight: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return weights as integers of at least 1."""
    scale = min(1.0, LARGEST_WEIGHT / max(float(weight.sum()), 1.0))
    return np.maximum(np.rint(weight * scale), 1.0).astype(np.int64)
