"""Plans of replicas: their number, devices, placement and gradient reduction.

For every number of devices d = N // R, one search is run for each kind of device group of size d
(and each batch size), with a share of the budget; then R replicas of its result are simulated with
their reductions. Other values of d are not needed, as more devices never make a placement worse.
All R up to MOST_REPLICAS are tried; beyond that, powers of two and the largest, as the curve is
smooth. For a requested R, one replica per device and one replica on all devices are planned for
comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import networkx as nx

from envs.compiled import loading_stage
from envs.hardware.cluster import Cluster
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.topology import Block, replica_groups, slot_networks
from envs.replication import Replication
from graphs.gradients import Gradients, gradients_of, no_gradients
from graphs.graph import GraphArrays
from placer.choose import PlacementError
from placer.interrupt import Interrupt
from placer.job import Job, SearchConfig
from placer.pipeline import grouped, optimize_problem
from placer.progress import Progress, Silent
from placer.replicate.orders import Variant, variants
from placer.replicate.result import ReplicaPlan, Split
from placer.replicate.scaling import Scaling
from placer.replicate.sources import GraphSource, ModelSource, StepSource
from placer.result import Result
from placer.search.compilation import load_compiled_code
from placer.search.request import Budget


@dataclass(frozen=True, slots=True)
class Slice:
    """Reports the progress of one of several searches as part of their common stage."""

    whole: Progress
    number: int
    count: int

    def stage(self, title: str) -> None:
        """Ignore the title: there would be one stage per search."""

    def advance(self, share: float, text: str = "") -> None:
        """Report the share of all searches."""
        shown = f"{self.number + 1} of {self.count}"
        self.whole.advance(
            (self.number + share) / self.count, f"{shown}: {text}" if text else shown
        )


def share_of(budget: Budget, several: int | None) -> Budget:
    """Return the budget of each of several searches; one evaluation if ``several`` is None."""
    if several is None:
        return Budget(evaluations=1)
    if budget.seconds is not None:
        return Budget(seconds=budget.seconds / several)
    assert budget.evaluations is not None
    return Budget(evaluations=max(budget.evaluations // several, 1))


MOST_REPLICAS: Final = 16


def plan_job(job: Job, progress: Progress | None = None) -> ReplicaPlan:
    """Plan replicas of the step of a workload, or of a graph with known costs.

    Op costs may be measured, plans are not run.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device.
        ConstraintError: a constraint names ops or devices that do not exist, or contradicts
            another.
        ValueError: there are fewer devices than replicas, an op has no cost on any device, or a
            device is neither on this machine nor described.
        PlacementError: no replica fits.
        KeyboardInterrupt: stopped before there was any plan.
    """
    wanted = job.replicas
    assert wanted is not None
    hear = progress or Silent()
    source: StepSource
    if isinstance(job.source, nx.DiGraph):
        source = GraphSource(job.constraints.applied_to(job.source, job.cluster), job.cluster)
    else:
        with Interrupt():
            source = ModelSource(job, hear)
        if wanted.samples is None:
            wanted = replace(wanted, samples=source.samples)
    return _Planner(source, job.search, wanted, hear).plan()


@dataclass(frozen=True, slots=True)
class _Job:
    """Replicas on groups of devices, and the search that places one of them."""

    groups: Sequence[Block]
    search: tuple[int, Block]  # parts of the batch, devices of one replica
    is_baseline: bool = False


def _rank(split: Split) -> tuple[bool, float, int, int]:
    return split.is_baseline, -split.samples_per_s, split.devices, split.replicas


@dataclass(slots=True)
class _Searched:
    """The result of one search, or why there is none."""

    found: Result | None
    plans: Sequence[Variant] = ()
    why: str = ""


@dataclass(slots=True)
class _Planner:
    """Runs the searches and simulations of one plan."""

    source: StepSource
    search: SearchConfig
    wanted: Replication
    hear: Progress
    graphs: dict[int, nx.DiGraph[str]] = field(default_factory=dict)  # {parts of the batch: graph}
    arrays: dict[int, GraphArrays] = field(default_factory=dict)
    searched: dict[tuple[int, Block], _Searched] = field(default_factory=dict)
    search_s: float = 0.0

    def plan(self) -> ReplicaPlan:
        cost_source = self._graph(1).graph["cost_source"]
        problem = Problem.of(self.arrays[1], self.source.cluster)
        jobs = list(self._jobs(problem))
        self.hear.stage(loading_stage())
        load_compiled_code()
        searches = list(dict.fromkeys(job.search for job in jobs))
        self.hear.stage(f"Searching placements of a replica on {len(searches)} groups of devices")
        asked = {job.search for job in jobs if not job.is_baseline}
        self._search(problem.cluster, searches, asked)
        splits = [self._split(problem, job) for job in jobs if job.search in self.searched]
        splits.sort(key=_rank)
        if splits[0].found is None:
            raise PlacementError(splits[0].why)
        return ReplicaPlan(
            problem=problem,
            wanted=self.wanted,
            splits=tuple(splits),
            curve=tuple(self._scaling(problem).curve(splits[0])),
            searched=len(self.searched),
            left_out=len(searches) - len(self.searched),
            search_s=self.search_s,
            extraction=self.source.extraction,
            cost_source=cost_source,
        )

    def _graph(self, parts: int) -> nx.DiGraph[str]:
        if parts not in self.graphs:
            self.graphs[parts] = self.source.graph(parts)
            self.arrays[parts] = GraphArrays.from_graph(self.graphs[parts])
        return self.graphs[parts]

    def _jobs(self, problem: Problem) -> Iterator[_Job]:
        count, asked = problem.device_count, self.wanted.replicas
        if asked is not None and asked > count:
            raise ValueError(
                f"{asked} replicas need a device each, and {problem.cluster.name!r} has {count}: "
                f"ask for at most {count}"
            )
        is_enough = False
        for size in dict.fromkeys(count // r for r in range(asked or 1, count + 1)):
            for alike in replica_groups(problem, size):
                for replicas in self._counts(len(alike)):
                    yield self._job(alike[:replicas])
                    is_enough = asked is not None
            if is_enough:
                yield from self._baselines(problem, asked or 1, size)
                return
        if asked is not None:
            raise ValueError(
                f"no {asked} devices of {problem.cluster.name!r} are alike (kind, memory, costs): "
                "replicas of one placement need groups that are"
            )

    def _job(self, groups: Sequence[Block], *, is_baseline: bool = False) -> _Job:
        return _Job(groups, (self.wanted.parts(len(groups)), groups[0]), is_baseline)

    def _baselines(self, problem: Problem, replicas: int, size: int) -> Iterator[_Job]:
        """Yield one replica per device and one on all devices, unless they were requested."""
        single, whole = replica_groups(problem, 1)[0], replica_groups(problem, problem.device_count)
        if (replicas, size) != (len(single), 1):
            yield self._job(single, is_baseline=True)
        if size != problem.device_count:
            yield self._job(whole[0][:1], is_baseline=True)

    def _counts(self, most: int) -> list[int]:
        """Return the numbers of replicas to try; with a global batch each needs its own search."""
        if self.wanted.replicas is not None:
            return [r for r in (self.wanted.replicas,) if r <= most]
        if self.wanted.batch == "global":
            cut = [
                r for r in range(1, most + 1) if not self.wanted.uneven_parts(self.wanted.parts(r))
            ]
            return sorted({most, *cut[-1:]})
        powers = (1 << k for k in range(most.bit_length()))
        return sorted({*range(1, min(most, MOST_REPLICAS) + 1), *powers, most})

    def _search(
        self,
        cluster: Cluster,
        searches: Sequence[tuple[int, Block]],
        asked: Collection[tuple[int, Block]],
    ) -> None:
        """Run the searches in turn; if the user stops them, completed ones count.

        If no requested search found a placement that fits, the one with most devices is repeated
        with the whole search budget.

        Raises:
            KeyboardInterrupt: stopped before there was any placement.
        """
        several = sum(self._is_search(*search) for search in searches)
        for number, (parts, group) in enumerate(searches):
            budget = share_of(
                self.search.budget, several if self._is_search(parts, group) else None
            )
            hear = Slice(self.hear, number, len(searches))
            try:
                found = self._searched(parts, cluster.part(group), budget, hear)
            except KeyboardInterrupt:
                if all(known.found is None for known in self.searched.values()):
                    raise
                return
            self.searched[parts, group] = found
            if found.found is not None and found.found.stopped:
                return
        if several > 1 and all(self.searched[search].found is None for search in asked):
            parts, group = max(asked, key=lambda search: (self._is_search(*search), len(search[1])))
            self.searched[parts, group] = self._searched(
                parts, cluster.part(group), self.search.budget, self.hear
            )

    def _is_search(self, parts: int, group: Block) -> bool:
        return len(group) > 1 and not self.wanted.uneven_parts(parts)

    def _searched(self, parts: int, cluster: Cluster, budget: Budget, hear: Progress) -> _Searched:
        if why := self.wanted.uneven_parts(parts):
            return _Searched(found=None, why=why)
        search = replace(self.search, budget=budget, measure=False)
        try:
            graph = self._graph(parts)
            problem = Problem.of(self.arrays[parts], cluster)
            found = optimize_problem(problem, search, hear, coarse=grouped(graph, search))
            plans = variants(problem, found, self._gradients(problem.graph))
        except (PlacementError, ValueError) as error:
            return _Searched(found=None, why=str(error))
        self.search_s += found.search_s
        return _Searched(found=found, plans=plans)

    def _gradients(self, graph: GraphArrays) -> Gradients:
        return gradients_of(graph, self.source.makers) if self._trains else no_gradients()

    @property
    def _trains(self) -> bool:
        extraction = self.source.extraction
        return extraction is None or extraction.step.training

    def _split(self, problem: Problem, job: _Job) -> Split:
        known, names = self.searched[job.search], problem.cluster.names
        split = Split(
            groups=tuple(tuple(names[d] for d in group) for group in job.groups),
            samples=self.wanted.step_samples(len(job.groups)),
            is_baseline=job.is_baseline,
            why=known.why,
        )
        if known.found is None:
            return split
        try:
            networks = slot_networks(problem, job.groups)
        except ValueError as error:
            return replace(split, why=str(error))
        plans = known.plans if split.replicas > 1 else known.plans[:1]
        steps = [replicated(plan.step, networks, self.wanted) for plan in plans]
        best = min(range(len(plans)), key=lambda i: steps[i].step_s)
        split = replace(
            split,
            found=plans[best].chosen_of(known.found),
            alone=plans[best].step,
            step=steps[best],
        )
        return replace(split, one_samples_per_s=self._scaling(problem).one_samples_per_s(split))

    def _scaling(self, problem: Problem) -> Scaling:
        return Scaling(problem, self.wanted, self.graphs, self._gradients)
