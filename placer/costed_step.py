"""Steps with their op costs, ready to search.

:func:`costed_step` is the way from a job to its graph with costs, for all commands and functions.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import networkx as nx

from envs.compiled import loading_stage
from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_here, is_local_core_set
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import costed, runtime_for
from graphs.graph import GraphArrays
from placer.job import Job
from placer.messages import core_refusal
from placer.progress import Progress, counter
from placer.search.compilation import compiled_beside, load_compiled_code
from placer.warm_start import placement_of

if TYPE_CHECKING:
    from envs.runtime import Runtime
    from graphs.extract import Extraction


@dataclass(frozen=True, kw_only=True)
class CostedStep:
    """A step with op costs; extraction and runtime are None for a graph with known costs."""

    graph: nx.DiGraph[str]  # with costs and user constraints
    cluster: Cluster  # calibrated, with the memory that placements may use
    warm_start: Placement | None = None
    extraction: Extraction | None = None
    runtime: Runtime | None = None

    @cached_property
    def problem(self) -> Problem:
        """The problem of placing the step."""
        return Problem.of(GraphArrays.from_graph(self.graph), self.cluster)

    @property
    def can_run(self) -> bool:
        """Return whether the step can be run: it has a model, and all devices are here."""
        # A graph has no runtime: is_here, which imports torch, is not called for it.
        runs = self.runtime is not None and self.runtime.runs
        return runs and all(map(is_here, self.cluster.names))


def costed_step(job: Job, progress: Progress, *, simulates: bool = True) -> CostedStep:
    """Extract the step of a loaded job and measure or look up its op costs.

    With ``simulates``, also calibrate links and compile what a simulation needs.
    """
    if isinstance(job.source, nx.DiGraph):
        graph = job.constraints.applied_to(job.source, job.cluster)
        return CostedStep(
            graph=graph, cluster=job.cluster, warm_start=_warm_start(job, None, graph)
        )
    from envs.costs.roofline import check_cluster
    from envs.executors.cores.custom_ops import registrations
    from envs.runtime import calibrated
    from graphs.extract import Workload, extract
    from graphs.extract.eager import check_has_memory

    workload, cluster = job.source, job.cluster
    assert isinstance(workload, Workload)  # loaded
    check_cluster(cluster)
    if any(map(is_here, cluster.names)):
        check_has_memory(workload)
    progress.stage("Extracting the graph")
    with compiled_beside() if simulates else nullcontext(False) as compiles:
        extraction = extract(workload, job.extractor)
        if extraction.step_program is not None and any(map(is_local_core_set, cluster.names)):
            registrations(extraction.program)  # raises for operators that workers cannot have
        if simulates and any(map(is_local_core_set, cluster.names)):
            progress.remark(core_refusal(extraction))
        runtime = runtime_for(extraction, cluster, overlap=job.search.overlap)
        graph = job.constraints.applied_to(runtime.graph, cluster)
        warm_start = _warm_start(job, extraction, graph)
        if compiles:  # before anything is timed
            progress.stage(loading_stage())
            load_compiled_code()
    if simulates and all(map(is_here, cluster.names)) and not cluster.links:
        progress.stage("Calibrating devices")
        cluster = calibrated(cluster)
    progress.stage("Measuring op costs")
    return CostedStep(
        graph=costed(runtime, graph, cluster, progress=counter(progress)),
        cluster=runtime.planned(cluster),
        warm_start=warm_start,
        extraction=extraction,
        runtime=runtime,
    )


def unplaced_problem(step: CostedStep, job: Job, progress: Progress) -> Problem | None:
    """Return the problem of the unplaced model, which runs on one of its devices.

    None if nothing is run, pins forbid it, or all that could be unplaced is placed.
    """
    search = job.search
    if not (step.can_run and search.measure) or search.backend is not None:
        return None
    if search.objective.micro_batches != 1 or any(step.problem.graph.allowed):
        return None
    assert step.runtime is not None
    return step.runtime.unplaced_problem(step.problem, step.graph, counter(progress))


def _warm_start(
    job: Job, extraction: Extraction | None, graph: nx.DiGraph[str]
) -> Placement | None:
    start = job.search.start_from
    if start is None:
        return None
    return placement_of(start, extraction, GraphArrays.from_graph(graph), job.cluster)
