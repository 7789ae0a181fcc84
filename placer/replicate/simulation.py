"""Simulations of a plan: its candidates with reductions, and its scaling to more replicas.

A search for a single replica leaves gradients for last if nothing waits for them, which exposes
all communication. So each of the fastest placements is also tried in graph order (autograd's, for
a model) and with the ops that compute gradients first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import networkx as nx
import numpy as np

from envs.collectives import MeasuredAllReduce
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaSimulator, ReplicaStep
from envs.replicas.topology import (
    SlotNetwork,
    busy_shares,
    nearest_groups,
    replica_groups,
    slot_networks,
)
from envs.replication import Replication
from graphs.costs import BusyShares, with_busy_devices, with_part_of_batch
from graphs.gradients import Gradients
from graphs.graph import GraphArrays
from placer.replicate.result import CurvePoint, Split, share_of_ideal
from placer.result import Result
from placer.search.candidate import Candidate, Prediction

MOST_PLANS: Final = 4
CURVE_DEVICES: Final = 4096
"""Number of devices that the curve reaches at least."""
_AMPLE_BYTES: Final = 2**60


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
    """Return the candidates to simulate with reductions, the best single-replica one first."""
    simulator = ReplicaSimulator(problem, gradients)
    best = result.best
    first = Variant(best, simulator.step(best.placement))
    if not len(gradients):
        return [first]
    others = [c for c in result.candidates if np.isfinite(c.predicted_s) and c is not best]
    fastest = [best, *sorted(others, key=lambda candidate: candidate.predicted_s)][:MOST_PLANS]
    return [first, *(variant for each in fastest for variant in _orders(simulator, each))]


def _orders(simulator: ReplicaSimulator, candidate: Candidate) -> Iterator[Variant]:
    graph, cluster = simulator.problem.graph, simulator.problem.cluster
    in_order = np.empty(len(graph))
    in_order[graph.topological] = -np.arange(len(graph))
    makers = {op for ops in simulator.gradients.makers for op in ops}
    early = np.array(candidate.placement.priority)
    early[list(makers)] += np.ptp(early) + 1
    for name, priority in {"in order": in_order, "gradients first": early}.items():
        placement = replace(candidate.placement, priority=tuple(priority.tolist()))
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


@dataclass(frozen=True, slots=True)
class Scaling:
    """Simulates a split with other numbers of replicas.

    With a global batch, more replicas have less of it each: costs and activations of the placed
    step are scaled in proportion, to those of the replica with most samples. More replicas on one
    machine slow each other down as its other devices do.
    """

    problem: Problem  # of the whole cluster
    replication: Replication
    graphs: Mapping[int, nx.DiGraph[str]]  # by parts of the batch
    gradients: Callable[[GraphArrays], Gradients]
    measured: MeasuredAllReduce | None = None

    def one_samples_per_s(self, split: Split) -> float:
        """Return the throughput of a single replica."""
        group = [self.problem.cluster.index(name) for name in split.groups[0]]
        return self._point(split, [group], slot_networks(self.problem, [group])).samples_per_s

    def curve(self, split: Split) -> Iterator[CurvePoint]:
        """Yield points for 1, 2, 4, ... replicas up to all that the cluster holds, and beyond.

        They end before the first number of replicas without links for their reductions.
        """
        group = tuple(map(self.problem.cluster.index, split.groups[0]))
        alike = next(c for c in replica_groups(self.problem, len(group)) if group in c)
        size, most = len(group), len(alike)
        powers = [1 << k for k in range(CURVE_DEVICES.bit_length())]
        for r in sorted({r for r in powers if r < most} | {most}):
            near = nearest_groups(self.problem, alike, r)
            try:
                networks = slot_networks(self.problem, near, self.measured)
            except ValueError:  # a link is missing
                return
            yield self._point(split, near, networks)
        last = -(-CURVE_DEVICES // (size * most)) if most > 1 else 1
        for factor in sorted({factor for factor in (*powers, last) if 1 < factor <= last}):
            repeated = [network.repeated(factor) for network in networks]
            yield self._point(split, alike, repeated, repeats=factor)

    def _point(
        self,
        split: Split,
        groups: Sequence[Sequence[int]],
        networks: Sequence[SlotNetwork],
        *,
        repeats: int = 1,
    ) -> CurvePoint:
        replicas = len(groups) * repeats
        alone = self._replica(split, replicas, busy_shares(self.problem.load, groups))
        step = replicated(alone, networks, self.replication)
        samples = self.replication.step_samples(replicas)
        samples_per_s = samples / step.step_s if step.step_s else np.inf
        assert split.result is not None
        return CurvePoint(
            replicas=replicas,
            devices=replicas * split.devices_each,
            samples_per_s=samples_per_s,
            efficiency=share_of_ideal(samples_per_s, replicas * split.simulated_one_per_s),
            exposed_s=step.exposed_s,
            hidden_s=step.hidden_s,
            beyond_cluster=repeats > 1,
            fits=bool((alone.peak_bytes <= split.result.problem.memory_bytes).all()),
        )

    def _replica(self, split: Split, replicas: int, busy: BusyShares) -> ReplicaStep:
        assert split.result is not None, "a split without a placement has no step"
        assert split.alone is not None, "as before"
        parts = self.replication.largest_part(replicas)
        placed_parts = self.replication.parts(split.replicas)
        placed = [list(map(self.problem.cluster.index, group)) for group in split.groups]
        if parts == placed_parts and busy == busy_shares(self.problem.load, placed):
            return split.alone
        loaded = with_busy_devices(self.graphs[placed_parts], busy)
        part = with_part_of_batch(loaded, parts / placed_parts)
        graph, cluster = GraphArrays.from_graph(part), split.result.problem.cluster
        devices = tuple(replace(d, memory_bytes=_AMPLE_BYTES) for d in cluster.devices)
        problem = Problem.of(graph, replace(cluster, devices=devices))
        placement = replace(split.result.placement, graph=graph.hash, cluster=cluster.name)
        return ReplicaSimulator(problem, self.gradients(graph)).step(placement)
