"""Candidates for replication: the fastest placements of one replica, in several op orders.

A search for a single replica leaves gradients for last if nothing waits for them, which exposes
all communication. So each of the fastest placements is also tried in graph order (autograd's, for
a model) and with the ops that compute gradients first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.placement import Placement
from envs.problem import Problem
from envs.replicas.step import ReplicaSimulator, ReplicaStep
from graphs.gradients import Gradients
from placer.outcome import Optimization, Row

MOST_PLANS: Final = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """A candidate and the simulated step of one replica of it."""

    row: Row
    step: ReplicaStep

    def chosen_of(self, found: Optimization) -> Optimization:
        """Return an optimization result with this candidate as its best."""
        if self.row is found.best:
            return found
        predicted = {**(found.placement.predicted or {}), **self.row.times_s}
        predicted |= {
            "step_s": self.row.predicted_s,
            "peak_memory_bytes": self.row.peak_memory_bytes,
        }
        placement = replace(self.row.placement, predicted=predicted)
        return replace(found, placement=placement, best=self.row, rows=(*found.rows, self.row))


def variants(problem: Problem, found: Optimization, gradients: Gradients) -> list[Variant]:
    """Return the candidates to simulate with reductions, the best single-replica one first.

    Raises:
        ValueError: that one cannot be simulated.
    """
    simulator = ReplicaSimulator(problem, gradients)
    first = Variant(found.best, simulator.step(found.best.placement))
    if not len(gradients):
        return [first]
    able = [row for row in found.rows if np.isfinite(row.predicted_s) and row is not found.best]
    fastest = [found.best, *sorted(able, key=lambda row: row.predicted_s)][:MOST_PLANS]
    others = (variant for row in fastest for variant in _orders(simulator, row))
    return [first, *others]


def _orders(simulator: ReplicaSimulator, row: Row) -> Iterator[Variant]:
    graph, cluster = simulator.problem.graph, simulator.problem.cluster
    in_order = np.empty(len(graph))
    in_order[graph.topological] = -np.arange(len(graph))
    makers = {op for own in simulator.gradients.makers for op in own}
    early = np.array(row.placement.priority)
    early[list(makers)] += np.ptp(early) + 1
    orders: dict[str, NDArray[np.float64]] = {"in order": in_order, "gradients first": early}
    for name, priority in orders.items():
        placement: Placement = replace(row.placement, priority=tuple(priority.tolist()))
        try:
            step = simulator.step(placement)
        except ValueError:  # an op that runs earlier may hold memory longer
            continue
        yield Variant(
            replace(
                row,
                name=f"{row.name}, {name}",
                placement=placement,
                predicted_s=step.step_ns / 1e9,
                peak_memory_bytes=dict(zip(cluster.names, step.peak_bytes.tolist(), strict=True)),
            ),
            step,
        )
