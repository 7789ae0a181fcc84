"""Groups of ops that are placed as one: by co-location, or of a few ops on large graphs.

The first may form cycles: their members share a device, but need not run together.

The second are a level above a large graph, with about a quarter of its ops. They are pieces of a
topological order that follows one branch after another
(:func:`graphs.coarsen.merging.cut_by_weight`), so that they form no cycle. A group has the sizes
and costs of its ops together, so that it never takes less memory than they do. Groups hide what
runs in parallel within them: their placements are starts, and the search goes on by ops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.problem import Bools, Ints, Longs, Problem
from envs.simulator import INFEASIBLE_NS
from graphs.coarsen.groups import priority_of_ops, united_labels
from graphs.coarsen.merging import Quotient, colocated, cut_by_weight
from graphs.coarsen.sizes import GroupSizes
from graphs.graph import GraphArrays, adjacency, frozen
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.decoder import HEFT
from placer.search.list_scheduler.sight import REPEATING

GROUPED_OPS: Final = 20_000
HEAVIEST: Final = 5.0
"""Most work of a group of several ops, in average ops: groups then have about four."""
EXPANDED: Final = (Kind.HEFT, Kind.POLICY, Kind.EVOLUTION, Kind.BEAM, Kind.ANNEALING)
"""Kinds of candidates for groups of which the best one is expanded."""
EVALUATIONS: Final = 4
"""Evaluations that an expansion takes."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """G groups of the N ops of a problem, numbered by their topologically first member."""

    problem: Problem
    group_of: Longs  # (N,)

    def __len__(self) -> int:
        """Return G."""
        return int(self.group_of.max()) + 1

    @cached_property
    def allowed(self) -> Bools:
        """Devices where all members are allowed, (G, D); every group has one."""
        allowed = np.ones((len(self), self.problem.device_count), np.bool_)
        np.logical_and.at(allowed, self.group_of, self.problem.allowed)
        return allowed

    @cached_property
    def cost_ns(self) -> Longs:
        """Sum of the members' costs on each device, (G, D), 0 where a member is not allowed."""
        cost = np.zeros((len(self), self.problem.device_count), np.int64)
        np.add.at(cost, self.group_of, self.problem.cost_ns)
        return np.where(self.allowed, cost, 0)

    def expand(self, devices: NDArray[np.integer]) -> Ints:
        """Return devices of ops (..., N) from those of groups (..., G)."""
        return np.asarray(devices[..., self.group_of], np.int32)


def units(problem: Problem) -> Grouping:
    """Return the co-location groups, with every other op as a group of its own."""
    group = problem.graph.group.astype(np.int64)
    alone = group < 0
    group[alone] = group.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    return Grouping(problem, numbered(problem, group))


def numbered(problem: Problem, group: Longs) -> Longs:
    """Renumber groups in topological order of their first members."""
    order = problem.graph.topological
    _, first, inverse = np.unique(group[order], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered = np.empty(len(group), np.int64)
    numbered[order] = rank[inverse]
    return numbered


def spread(problem: Problem, wish: Longs) -> Ints:
    """Give each op the device of its ``wish`` (N,), or the cheapest allowed one.

    A group goes where its topologically first member wishes; ``wish`` is updated in place.
    """
    order = problem.graph.topological
    group = problem.graph.group[order]
    cost = np.array(problem.cost_ns)
    grouped = group >= 0
    if grouped.any():
        first = np.unique(group[grouped], return_index=True)[1]
        wish[order[grouped]] = wish[order[grouped][first]][group[grouped]]
        total = np.zeros((len(first), problem.device_count), np.int64)
        np.add.at(total, group[grouped], cost[order[grouped]])
        cost[order[grouped]] = total[group[grouped]]
    cheapest = np.where(problem.allowed, cost, np.iinfo(np.int64).max).argmin(axis=1)
    fits = problem.allowed[np.arange(problem.op_count), wish]
    return np.where(fits, wish, cheapest).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The problem of placing G groups of the N ops of another problem."""

    problem: Problem
    group_of: Longs  # (N,) groups are numbered in a topological order
    running: Longs  # (N,) ops by group, those of a group in topological order

    def starts(self, candidates: list[Candidate], evaluator: Evaluator) -> list[Candidate]:
        """Return candidates for the ops, by ``evaluator``, from ranked ones for the groups."""
        best: dict[Kind, Candidate] = {}
        for candidate in candidates:
            if candidate.kind in EXPANDED and candidate.step_ns < INFEASIBLE_NS:
                best.setdefault(candidate.kind, candidate)
        return [start for one in best.values() for start in self._expanded(one, evaluator)]

    def _expanded(self, candidate: Candidate, evaluator: Evaluator) -> list[Candidate]:
        """Return a candidate with the same devices, and one that is decoded in sight of it.

        The first has the better one of two orders: that of the groups, or by upward rank.
        """
        kind = Kind.EVOLUTION if candidate.kind is Kind.HEFT else candidate.kind
        devices = candidate.devices[self.group_of].astype(np.int32)
        in_order = priority_of_ops(candidate.priority, self.group_of, self.running)
        orders = np.stack([in_order, evaluator.scheduling.bottom_level])
        costs = evaluator.costs(np.stack([devices, devices]), orders)
        first = int(costs.argmin())
        kept = evaluator.candidate(kind, devices, orders[first], int(costs[first]))
        if kept.step_ns == INFEASIBLE_NS:
            return []
        evaluator.look_at(kept)
        rows = np.concatenate([HEFT, REPEATING])[None]
        [devices], [priority], [cost] = evaluator.decode(rows)
        return [kept, evaluator.candidate(Kind.EVOLUTION, devices, priority, int(cost))]


def has_levels(problem: Problem) -> bool:
    """Return whether groups of ops are placed first: the graph is large, and costs add up.

    With hosts launches count for each op, and under load a cost depends on other devices.
    """
    return problem.op_count >= GROUPED_OPS and not _has_context(problem)


def _has_context(problem: Problem) -> bool:
    return problem.hosts is not None or problem.load is not None


def level_above(problem: Problem) -> Level:
    """Return the problem of placing groups of about four ops.

    Ops of different phases, or allowed on different devices, stay apart, and a group has ops of one
    co-location group at most.
    """
    assert not _has_context(problem), "costs of groups are sums"
    graph, count = problem.graph, problem.op_count
    apart = np.column_stack([graph.phase, problem.allowed])
    classes = np.unique(apart, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    group_of = colocated(graph, np.arange(count), graph.group.astype(np.int64), classes)
    label_of = united_labels(graph, group_of)
    finer = np.unique(classes * (count + 1) + label_of + 1, return_inverse=True)[1]
    work = problem.cheapest_ns().astype(np.float64) + 1.0
    heaviest = HEAVIEST * float(work.mean())
    cuts = cut_by_weight(graph, group_of, finer.astype(np.int64), work, heaviest)
    quotient = Quotient.of(graph, cuts)
    number = np.empty(quotient.count, np.int64)
    number[quotient.depth_first(np.zeros(quotient.count, np.int64))] = np.arange(quotient.count)
    group_of = number[cuts]
    position = np.empty(count, np.int64)
    position[graph.topological] = np.arange(count)
    running = np.lexsort((position, group_of))
    return Level(_grouped(problem, group_of, running, label_of), group_of, running)


def _grouped(problem: Problem, group_of: Longs, running: Longs, label_of: Longs) -> Problem:
    """Return the problem of the groups, numbered topologically; ``label_of`` is of ops, (N,)."""
    graph = problem.graph
    starts = np.searchsorted(group_of[running], np.arange(int(group_of.max()) + 1))
    first, count = running[starts], len(starts)
    sizes = GroupSizes.of(graph, group_of, running)
    ends = np.array(list(sizes.edges), np.int64).reshape(-1, 2)
    edge_bytes = np.array(list(sizes.edges.values()), np.int64)
    _, label = np.unique(label_of[first], return_inverse=True)
    label -= int(label_of[first].min() < 0)

    def column(values: object) -> Longs:
        return frozen(np.array(values, np.int64))

    zeros = column(np.zeros(count))  # of what no search reads
    groups = GraphArrays(
        name=graph.name,
        hash="",
        ids=tuple(map(str, range(count))),
        ops=("group",) * count,
        modules=tuple(graph.modules[i] for i in first.tolist()),
        phase=frozen(graph.phase[first]),
        flops=zeros,
        moved_bytes=zeros,
        saved_bytes=zeros,
        output_bytes=column(sizes.output_bytes),
        workspace_bytes=column(sizes.workspace_bytes),
        parameter_bytes=column(sizes.sums["parameter_bytes"]),
        gradient_bytes=column(sizes.sums["gradient_bytes"]),
        optimizer_bytes=column(sizes.sums["optimizer_bytes"]),
        group=frozen(label.astype(np.int32)),
        allowed=(None,) * count,
        cost_s={},
        topological=frozen(np.arange(count, dtype=np.int32)),
        **adjacency(ends[:, 0], ends[:, 1], edge_bytes, count),
    )
    return replace(
        problem,
        graph=groups,
        cost_ns=frozen(np.add.reduceat(problem.cost_ns[running], starts)),
        allowed=frozen(problem.allowed[first]),
        held_bytes=frozen(np.add.reduceat(problem.held_bytes[running], starts)),
    )
