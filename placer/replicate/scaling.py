"""Simulates the placement of a split with other numbers of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import networkx as nx
import numpy as np

from envs.hardware.cluster import Cluster
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaSimulator, ReplicaStep
from envs.replicas.topology import SlotNetwork, replica_groups, slot_networks
from envs.replication import Replication
from graphs.costs import with_part_of_batch
from graphs.gradients import Gradients
from graphs.graph import GraphArrays
from placer.replicate.result import CurvePoint, Split, share_of_ideal

CURVE_DEVICES: Final = 4096
"""Number of devices that the curve reaches at least."""
_AMPLE_BYTES: Final = 2**60


@dataclass(frozen=True, slots=True)
class Scaling:
    """Simulates a split with other numbers of replicas.

    With a global batch, more replicas have less of it each: costs and activations of the placed
    step are scaled in proportion, to those of the replica with most samples.
    """

    problem: Problem  # of the whole cluster
    wanted: Replication
    graphs: Mapping[int, nx.DiGraph[str]]  # by parts of the batch
    gradients: Callable[[GraphArrays], Gradients]

    def one_samples_per_s(self, split: Split) -> float:
        """Return the throughput of a single replica."""
        group = [self.problem.cluster.index(name) for name in split.groups[0]]
        return self._point(split, 1, slot_networks(self.problem, [group])).samples_per_s

    def curve(self, split: Split) -> Iterator[CurvePoint]:
        """Yield points for 1, 2, 4, ... replicas up to all that the cluster holds, and beyond."""
        group = tuple(map(self.problem.cluster.index, split.groups[0]))
        alike = next(c for c in replica_groups(self.problem, len(group)) if c[0] == group)
        size, most = len(group), len(alike)
        networks = slot_networks(self.problem, alike)
        powers = [1 << k for k in range(CURVE_DEVICES.bit_length())]
        counts = {r for r in powers if r < most} | {most}
        if most > 1:
            last = -(-CURVE_DEVICES // (size * most))
            counts |= {most * factor for factor in (*powers, last) if factor <= last}
        for r in sorted(counts):
            yield self._point(
                split,
                r,
                slot_networks(self.problem, alike[:r])
                if r <= most
                else [network.repeated(r // most) for network in networks],
                beyond=r > most,
            )

    def _point(
        self, split: Split, replicas: int, networks: Sequence[SlotNetwork], *, beyond: bool = False
    ) -> CurvePoint:
        one, wanted = self._replica(split, replicas), self.wanted
        found = replicated(one, networks, wanted)
        samples = wanted.step_samples(replicas)
        samples_per_s = samples / found.step_s if found.step_s else np.inf
        assert split.found is not None
        memory_bytes = split.found.problem.memory_bytes
        return CurvePoint(
            replicas=replicas,
            devices=replicas * split.devices_each,
            samples_per_s=samples_per_s,
            efficiency=share_of_ideal(samples_per_s, replicas * split.one_samples_per_s),
            exposed_s=found.exposed_s,
            hidden_s=found.hidden_s,
            beyond=beyond,
            fits=bool((one.peak_bytes <= memory_bytes).all()),
        )

    def _replica(self, split: Split, replicas: int) -> ReplicaStep:
        assert split.found is not None, "a split without a plan has no step"
        assert split.alone is not None, "as before"
        parts, own = self.wanted.largest_part(replicas), self.wanted.parts(split.replicas)
        if parts == own:
            return split.alone
        graph = GraphArrays.from_graph(with_part_of_batch(self.graphs[own], parts / own))
        problem = Problem.of(graph, _with_ample_memory(split.found.problem.cluster))
        placement = replace(split.found.placement, graph=graph.hash, cluster=problem.cluster.name)
        return ReplicaSimulator(problem, self.gradients(graph)).step(placement)


def _with_ample_memory(cluster: Cluster) -> Cluster:
    devices = (replace(device, memory_bytes=_AMPLE_BYTES) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))
