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
from placer.result import Result
from placer.search.candidate import Candidate, Prediction

MOST_PLANS: Final = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """A candidate and the simulated step of one replica of it."""

    candidate: Candidate
    step: ReplicaStep

    def chosen_of(self, result: Result) -> Result:
        """Return a result with this candidate as its best."""
        chosen = self.candidate
        if chosen is result.best:
            return result
        predicted = {**(result.placement.predicted or {}), **chosen.times_s}
        predicted |= {
            "step_s": chosen.predicted_s,
            "peak_memory_bytes": dict(chosen.peak_memory_bytes),
        }
        placement = replace(chosen.placement, predicted=predicted)
        candidates = (*result.candidates, chosen)
        return replace(result, placement=placement, best=chosen, candidates=candidates)


def variants(problem: Problem, result: Result, gradients: Gradients) -> list[Variant]:
    """Return the candidates to simulate with reductions, the best single-replica one first.

    Raises:
        ValueError: that one cannot be simulated.
    """
    simulator = ReplicaSimulator(problem, gradients)
    best = result.best
    first = Variant(best, simulator.step(best.placement))
    if not len(gradients):
        return [first]
    able = [c for c in result.candidates if np.isfinite(c.predicted_s) and c is not best]
    fastest = [best, *sorted(able, key=lambda own: own.predicted_s)][:MOST_PLANS]
    others = (variant for own in fastest for variant in _orders(simulator, own))
    return [first, *others]


def _orders(simulator: ReplicaSimulator, candidate: Candidate) -> Iterator[Variant]:
    graph, cluster = simulator.problem.graph, simulator.problem.cluster
    in_order = np.empty(len(graph))
    in_order[graph.topological] = -np.arange(len(graph))
    makers = {op for own in simulator.gradients.makers for op in own}
    early = np.array(candidate.placement.priority)
    early[list(makers)] += np.ptp(early) + 1
    orders: dict[str, NDArray[np.float64]] = {"in order": in_order, "gradients first": early}
    for name, priority in orders.items():
        placement: Placement = replace(candidate.placement, priority=tuple(priority.tolist()))
        try:
            step = simulator.step(placement)
        except ValueError:  # an op that runs earlier may hold memory longer
            continue
        prediction = Prediction(
            placement=placement,
            objective_s=step.step_ns / 1e9,
            peak_memory_bytes=dict(zip(cluster.names, step.peak_bytes.tolist(), strict=True)),
            times_s=candidate.times_s,
        )
        reordered = replace(candidate, name=f"{candidate.name}, {name}", prediction=prediction)
        yield Variant(reordered, step)
