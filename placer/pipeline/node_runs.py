"""Runs of candidates on the nodes of a Ray cluster, which decide what is run on this machine.

Placements are run in groups, each on one node, and the fastest of each group goes on. These meet
on this machine, beside the baselines, where the result is chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from envs.hardware.discover import is_here
from envs.measured import FEWEST_ROUNDS, STARTING_S, runs_s
from envs.measurement import Measurement, contended, tied
from envs.problem import Problem
from placer.choose import MEASURED_CANDIDATES
from placer.job import Job
from placer.progress import Progress, counter
from placer.ray_cluster.connection import RayCluster
from placer.ray_cluster.measuring import MeasuringNodes
from placer.ray_cluster.node_step import Loadable, NodeStep, Runs
from placer.search.candidate import Candidate, Kind

MOST_ON_NODES: Final = (3 * MEASURED_CANDIDATES, 2 * MEASURED_CANDIDATES)
"""Most placements that run on nodes, then if time is short, in as many groups as run here."""


@contextmanager
def measuring_nodes(job: Job, progress: Progress) -> Iterator[MeasuringNodes | None]:
    """Yield the nodes that run candidates of a loaded job, None unless there are several.

    A remark tells why the cluster of the job has none.
    """
    address = job.search.ray_address
    if address is None or not _is_measured(job):
        yield None
        return
    with RayCluster(address) as cluster:
        try:
            nodes = MeasuringNodes(cluster, job.cluster)
        except ValueError as error:
            progress.remark(f"Candidates run on this machine only: {error}.")
            yield None
            return
        with nodes:
            yield nodes if len(nodes.names) > 1 else None


def _is_measured(job: Job) -> bool:
    """Return whether candidates of a job run on devices of this machine."""
    if job.has_costs or not job.search.measure or job.search.backend is not None:
        return False
    return all(map(is_here, job.cluster.names))


@dataclass(slots=True, kw_only=True)
class NodeRuns:
    """Runs groups of placements on nodes; ``measuring_s`` is what all runs took."""

    nodes: MeasuringNodes
    step: Callable[[Problem], Loadable]
    progress: Progress
    measuring_s: float = 0.0

    @classmethod
    def of(cls, job: Job, nodes: MeasuringNodes, progress: Progress) -> NodeRuns:
        """Run the candidates of a loaded job."""
        from graphs.extract import Workload

        workload = job.source
        assert isinstance(workload, Workload)  # loaded

        def step(problem: Problem) -> NodeStep:
            overlap = job.search.overlap
            return NodeStep.of(
                workload, problem, job.cluster, extractor=job.extractor, overlap=overlap
            )

        return cls(nodes=nodes, step=step, progress=progress)

    def preselected(
        self, problem: Problem, candidates: Sequence[Candidate], seconds: float
    ) -> list[Candidate]:
        """Return the candidates, with all but the fastest placement of each group eliminated.

        The groups depend on the predictions only, and are smaller where all of them would not run
        within ``seconds``. If the nodes are lost, or cannot load the model, nothing is eliminated.
        Candidates that go on are no longer spare.
        """
        groups, share_s = self._fitting(candidates, seconds)
        several = [group for group in groups if len(group) > 1]
        if not several:
            return list(candidates)
        predicted_s = sorted(candidates[i].predicted_s for group in several for i in group)
        self.progress.stage("Running placements on the Ray cluster")
        try:
            runs = Runs(tuple(predicted_s), seconds=share_s)
            measured = self._measured(problem, candidates, several, runs)
        except Exception as error:  # noqa: BLE001 - whatever happens on other machines
            self.progress.remark(f"Candidates run on this machine only: {error}.")
            return list(candidates)
        winners = [_winner(*each) for each in zip(several, measured, strict=True)]
        if all(winner is None for winner in winners):
            self.progress.remark("Candidates run on this machine only: all failed on the nodes.")
            return list(candidates)
        after = list(candidates)
        for i in (i for group in groups for i in group):
            after[i] = replace(candidates[i], spare=False)
        for group, measurements, winner in zip(several, measured, winners, strict=True):
            for i, one in zip(group, measurements, strict=True):
                if i != winner:
                    after[i] = replace(after[i], measurement=one, eliminated=True)
        return after

    def _fitting(
        self, candidates: Sequence[Candidate], seconds: float
    ) -> tuple[list[list[int]], float]:
        """Return the largest groups that run in time, and the seconds of each; [] if none do."""
        for most in MOST_ON_NODES:
            groups = groups_of(candidates, most)
            several = [[candidates[i].predicted_s for i in own] for own in groups if len(own) > 1]
            waves = max(math.ceil(len(several) / self.nodes.at_once), 1)
            longest_s = max((runs_s(each, FEWEST_ROUNDS) for each in several), default=0.0)
            if STARTING_S + waves * (longest_s - STARTING_S) <= seconds:  # workers start once
                return groups, (seconds - STARTING_S) / waves
        return [], 0.0

    def _measured(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        groups: Sequence[Sequence[int]],
        runs: Runs,
    ) -> list[list[Measurement]]:
        """Load the step on the nodes and run the groups; the nodes are free again after it."""
        placements = [[candidates[i].placement for i in group] for group in groups]
        with self.nodes:
            step, report = self.step(problem), partial(self.progress.advance, 0.0)
            self.nodes.load(step, len(groups), report)
            began = time.perf_counter()
            try:
                return self.nodes.measure(placements, runs, counter(self.progress))
            finally:
                self.measuring_s += time.perf_counter() - began


def groups_of(candidates: Sequence[Candidate], most: int = MOST_ON_NODES[0]) -> list[list[int]]:
    """Return indices of the best placements by prediction, at most so many, dealt in turn."""
    placements = [
        i
        for i, each in enumerate(candidates)
        if np.isfinite(each.predicted_s)
        and each.kind is not Kind.WARM_START
        and not (each.is_single or each.is_unplaced or each.eliminated)
    ]
    placements.sort(key=lambda i: candidates[i].predicted_s)
    placements = placements[:most]
    return [placements[k::MEASURED_CANDIDATES] for k in range(MEASURED_CANDIDATES)]


def _winner(group: Sequence[int], measurements: Sequence[Measurement]) -> int | None:
    """Return the best by prediction of those as fast as the fastest; None if all failed."""
    ran = [(i, one) for i, one in zip(group, measurements, strict=True) if one.ok]
    if not ran:
        return None
    busy = contended(measurements)
    fastest = min((one for _, one in ran), key=lambda one: one.step_s(contended=busy))
    return next(i for i, one in ran if tied(one, fastest, contended=busy))
