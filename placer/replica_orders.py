"""Plans of one replica that may be the best of many: those that are fast alone, in several orders.

A search that knows of one replica leaves gradients for last where nothing waits for them; all
communication is then exposed. So each of the fastest plans is also tried with its ops in the order
of the graph, which for a model is that of autograd, and with ops that make gradients first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.placement import Placement
from envs.problem import Problem
from envs.replicas import ReplicaSimulator, ReplicaStep
from graphs.gradients import Gradients
from placer.outcome import Optimization, Row

MOST_PLANS: Final = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan, and what one replica of it does in a step."""

    row: Row
    step: ReplicaStep

    def chosen_of(self, found: Optimization) -> Optimization:
        """What was found, with this plan as the best of it."""
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
    """The plans to try with reductions, what is the best alone first.

    Raises:
        ValueError: that cannot be simulated.
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
    """One plan in other orders, as far as it still fits."""
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
        except ValueError:  # what runs earlier may need memory for longer
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
