"""Plans of replicas: their number, devices, placement and gradient reduction.

One search is run for each kind and size of device group (and each batch size, and load by other
replicas on its machine), with a share of the budget; then replicas of its result on groups of that
kind are simulated with their reductions, see :mod:`placer.replicate.groups`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import networkx as nx

from envs.collectives import HIERARCHICAL, MeasuredAllReduce
from envs.hardware.cluster import Cluster
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaSimulator
from envs.replicas.topology import (
    Block,
    busy_shares,
    evened,
    nearest_groups,
    ranks_by_level,
    replica_groups,
    slot_networks,
)
from envs.replication import Replication
from envs.runtime import costed
from graphs.costs import BusyShares, with_busy_devices
from graphs.graph import GraphArrays
from placer.choose import PlacementError
from placer.interrupt import Interrupt
from placer.job import Job, SearchConfig
from placer.pipeline import grouped, optimize_problem, searching
from placer.progress import Progress, Silent
from placer.replicate.fitting import FittedFactors, factors_path
from placer.replicate.groups import PlannedGroups, Search, planned_groups
from placer.replicate.result import ReplicaPlan, Split, training_of
from placer.replicate.simulation import Scaling, Variant, variants
from placer.replicate.sources import StepSource
from placer.replicate.trials import can_be_tried, with_trials
from placer.result import Result
from placer.search.compilation import load_compiled_code_in_a_stage
from placer.search.request import Budget
from placer.sources.batches import batch_size
from placer.sources.target import Target

NO_TARGET: Final = (
    "ranks on GPUs load the model from a target such as model.py:build, and this one is an object"
)


def plan_job(job: Job, progress: Progress | None = None) -> ReplicaPlan:
    """Plan replicas of the step of a workload, or of a graph with known costs.

    On cores and GPUs of this machine the best plans and the unplaced model are run, and the fastest
    wins; on GPUs if the job names a target, which ranks load. Raises a ReplicationError where the
    devices or the batch do not suit the replicas, and a PlacementError where no replica fits.
    """
    with searching(job.search):
        return _planned(job, progress or Silent())


def _planned(job: Job, progress: Progress) -> ReplicaPlan:
    replication = job.replicas
    assert replication is not None
    replication.check_on(job.cluster)
    target = job.source if isinstance(job.source, Target) else None
    job = job.loaded(progress)
    with Interrupt():
        source = StepSource(job, progress)
    if replication.samples is None and source.whole.extraction is not None:
        replication = replace(replication, samples=batch_size(source.whole.extraction.step))
        replication.check_on(job.cluster)
    planner = _Planner(source, job.search, replication, progress)
    can_try = source.runs_on_cores or (source.runs_on_gpus and target is not None)
    if not (can_try and can_be_tried(source.whole.extraction, replication)):
        untried = NO_TARGET if source.runs_on_gpus and target is None else ""
        return replace(planner.plan(), untried=untried)
    names = source.whole.cluster.names
    path = factors_path(names)
    planner.factors = FittedFactors.load(path)
    plan = planner.plan(with_unplaced=True)
    steps = {parts: each.extraction for parts, each in source.steps.items()}
    return with_trials(plan, steps, path, progress, target if source.has_cuda else None)


@dataclass(frozen=True, slots=True)
class _SharedStage:
    """Reports the progress of one of several searches as part of their common stage."""

    whole: Progress
    number: int
    count: int

    def stage(self, title: str) -> None:
        """Ignore the title: there would be one stage per search."""

    def advance(self, share: float, text: str = "") -> None:
        """Report the share of all searches."""
        place = f"{self.number + 1} of {self.count}"
        self.whole.advance(
            (self.number + share) / self.count, f"{place}: {text}" if text else place
        )

    def remark(self, text: str) -> None:
        """Show it as the whole job does."""
        self.whole.remark(text)


@dataclass(frozen=True, slots=True)
class _Searched:
    """The result of one search with its variants, or why there is none."""

    result: Result | None = None
    variants: Sequence[Variant] = ()
    why: str = ""


@dataclass(slots=True)
class _Planner:
    """Runs the searches and simulations of one plan."""

    source: StepSource
    search: SearchConfig
    replication: Replication
    progress: Progress
    graphs: dict[int, nx.DiGraph[str]] = field(default_factory=dict)  # {parts of the batch: graph}
    arrays: dict[tuple[int, BusyShares], GraphArrays] = field(default_factory=dict)
    searched: dict[Search, _Searched] = field(default_factory=dict)
    search_s: float = 0.0
    collectives: MeasuredAllReduce | None = None  # between ranks on the devices, if measured
    factors: FittedFactors = field(default_factory=FittedFactors)

    def plan(self, *, with_unplaced: bool = False) -> ReplicaPlan:
        graph, arrays = self._beside(1, BusyShares())
        cost_source = graph.graph["cost_source"]
        problem = Problem.of(arrays, evened(self.source.whole.cluster))
        planned = list(planned_groups(problem, self.replication))
        self.collectives = self.source.collectives(self._levels(problem, planned))
        load_compiled_code_in_a_stage(self.progress)
        searches = list(dict.fromkeys(each.search for each in planned))
        self.progress.stage(
            f"Searching placements of a replica on {len(searches)} groups of devices"
        )
        requested = {each.search for each in planned if not each.is_baseline}
        self._search(problem.cluster, searches, requested)
        splits = [self._split(problem, each) for each in planned if each.search in self.searched]
        splits.sort(key=lambda s: (s.is_baseline, -s.samples_per_s, s.devices, s.replicas))
        if splits[0].result is None:
            raise PlacementError(splits[0].why)
        unplaced = list(self._unplaced(problem)) if with_unplaced else []
        return ReplicaPlan(
            problem=problem,
            requested=self.replication,
            splits=(*splits, *unplaced),
            curve=tuple(self._scaling(problem).curve(splits[0])),
            searched=len(self.searched),
            left_out=len(searches) - len(self.searched),
            search_s=self.search_s,
            extraction=self.source.whole.extraction,
            cost_source=cost_source,
            collectives=self.collectives,
            uncalibrated=self.source.uncalibrated,
        )

    def _graph(self, parts: int) -> nx.DiGraph[str]:
        if parts not in self.graphs:
            self.graphs[parts] = self.source.graph(parts)
        return self.graphs[parts]

    def _beside(self, parts: int, busy: BusyShares) -> tuple[nx.DiGraph[str], GraphArrays]:
        """Return the graph for a part of the batch, with costs beside busy devices."""
        graph = with_busy_devices(self._graph(parts), busy)
        if (parts, busy) not in self.arrays:
            self.arrays[parts, busy] = GraphArrays.from_graph(graph)
        return graph, self.arrays[parts, busy]

    def _levels(self, problem: Problem, planned: Sequence[PlannedGroups]) -> set[tuple[int, ...]]:
        """Return the ranks at each level of hierarchical reductions, if they are wanted."""
        if self.replication.reduction != HIERARCHICAL:
            return set()
        return set().union(*(ranks_by_level(problem, each.groups) for each in planned))

    def _search(
        self, cluster: Cluster, searches: Sequence[Search], requested: Collection[Search]
    ) -> None:
        """Run the searches in turn; if the user stops them, completed ones count.

        If no requested search gave a placement that fits, the one with most devices is repeated
        with the whole search budget. A KeyboardInterrupt passes if there is no placement yet.
        """
        several = sum(self._has_choice(search) for search in searches)
        for number, search in enumerate(searches):
            budget = Budget(evaluations=1)
            if self._has_choice(search):
                budget = _share(self.search.budget, several)
            stage = _SharedStage(self.progress, number, len(searches))
            try:
                searched = self._searched(search, cluster, budget, stage)
            except KeyboardInterrupt:
                if all(before.result is None for before in self.searched.values()):
                    raise
                return
            self.searched[search] = searched
            if searched.result is not None and searched.result.stopped:
                return
        if several > 1 and all(self.searched[search].result is None for search in requested):
            largest = max(requested, key=lambda search: (self._has_choice(search), len(search[1])))
            self.searched[largest] = self._searched(
                largest, cluster, self.search.budget, self.progress
            )

    def _has_choice(self, search: Search) -> bool:
        parts, group, _ = search
        return len(group) > 1 and not self.replication.uneven_parts(parts)

    def _searched(
        self, search: Search, cluster: Cluster, budget: Budget, progress: Progress
    ) -> _Searched:
        parts, group, busy = search
        if why := self.replication.uneven_parts(parts):
            return _Searched(why=why)
        config = replace(self.search, budget=budget, measure=False)
        try:
            graph, arrays = self._beside(parts, busy)
            problem = Problem.of(arrays, cluster.part(group))
            result = optimize_problem(problem, config, progress, coarse=grouped(graph, config))
            plans = variants(problem, result, self.source.gradients(problem.graph))
        except (PlacementError, ValueError) as error:
            return _Searched(why=str(error))
        self.search_s += result.search_s
        return _Searched(replace(result, extraction=self.source.extraction(parts)), plans)

    def _split(self, problem: Problem, planned: PlannedGroups) -> Split:
        searched, names = self.searched[planned.search], problem.cluster.names
        split = Split(
            groups=tuple(tuple(names[d] for d in group) for group in planned.groups),
            samples=self.replication.step_samples(len(planned.groups)),
            is_baseline=planned.is_baseline,
            why=searched.why,
            training=self._training,
        )
        if searched.result is None:
            return split
        try:
            networks = slot_networks(problem, planned.groups, self.collectives)
        except ValueError as error:
            return replace(split, why=str(error))
        plans = searched.variants if split.replicas > 1 else searched.variants[:1]
        steps = [replicated(plan.step, networks, self.replication) for plan in plans]
        best = min(range(len(plans)), key=lambda i: steps[i].step_s)
        factors = self.factors.of(split.kind, searched.result.problem.graph.hash)
        if split.devices_each == 1:  # there is no other placement
            factors = factors.for_same(steps[best].alone_s)
        split = replace(
            split,
            result=plans[best].chosen_of(searched.result),
            alone=plans[best].step,
            step=steps[best],
            factors=factors,
        )
        return replace(split, simulated_one_per_s=self._scaling(problem).one_samples_per_s(split))

    def _unplaced(self, problem: Problem) -> Iterator[Split]:
        """Yield replicas of the unplaced model: as many as wanted, and one.

        On cores they are on all of them; on GPUs each has one.
        """
        requested = self.replication.replicas
        alone = self._single_gpus(problem) if self.source.runs_on_gpus else []
        count = len(alone) or problem.device_count
        for replicas in dict.fromkeys([requested or count, 1]):
            alike = alone or replica_groups(problem, count // replicas)[0]
            groups = nearest_groups(problem, alike, min(replicas, len(alike)))
            parts = self.replication.parts(replicas)
            if len(groups) < replicas or self.replication.uneven_parts(parts):
                continue
            try:
                graph = self._graph(parts)
                runtime = self.source.steps[parts].runtime
                assert runtime is not None, "a step that can run has a runtime"
                devices = [problem.cluster.part(group) for group in groups]
                joined = [runtime.joined(each) or each for each in devices]
                if joined[0] is not devices[0]:
                    graph = costed(runtime, graph, joined[0])
                loaded = with_busy_devices(graph, busy_shares(problem.load, groups))
                one = Problem.of(GraphArrays.from_graph(loaded), joined[0])
                config = replace(self.search, budget=Budget(evaluations=1), measure=False)
                result = optimize_problem(one, config)
                gradients = self.source.gradients(one.graph)
                first, *_ = variants(one, result, gradients)
                idle = Problem.of(GraphArrays.from_graph(graph), joined[0])
                single = ReplicaSimulator(idle, gradients).step(result.placement)
                networks = slot_networks(problem, [group[:1] for group in groups], self.collectives)
            except (PlacementError, ValueError):
                continue  # it does not fit, or its batch cannot be divided
            split = Split(
                groups=tuple(each.names for each in joined),
                samples=self.replication.step_samples(replicas),
                joined=len(groups[0]),
                is_baseline=requested not in (None, replicas),
                training=self._training,
                result=replace(result, extraction=self.source.extraction(parts)),
                alone=first.step,
                step=replicated(first.step, networks, self.replication),
            )
            factors = self.factors.of(split.kind, one.graph.hash)
            assert split.step is not None, "it was just simulated"
            factors = factors.for_same(split.step.alone_s)
            one_ns = (self.replication.accumulate - 1) * single.pass_ns + single.step_ns
            one_per_s = split.samples / replicas / (one_ns / 1e9)
            yield replace(split, factors=factors, simulated_one_per_s=one_per_s)

    @staticmethod
    def _single_gpus(problem: Problem) -> list[Block]:
        """Return the GPUs that are alike, most first, each as a group of its own."""
        classes, names = replica_groups(problem, 1), problem.cluster.names
        return next(alike for alike in classes if names[alike[0][0]].startswith("cuda:"))

    @property
    def _training(self) -> str:
        return training_of(self.replication, self.source.whole.extraction)

    def _scaling(self, problem: Problem) -> Scaling:
        return Scaling(
            problem, self.replication, self.graphs, self.source.gradients, self.collectives
        )


def _share(budget: Budget, several: int) -> Budget:
    if budget.seconds is not None:
        return Budget(seconds=budget.seconds / several)
    assert budget.evaluations is not None
    return Budget(evaluations=max(budget.evaluations // several, 1))
