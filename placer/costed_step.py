"""Steps with their op costs, ready to search.

:func:`costed_step` is the way from a job to its graph with costs, for all commands and functions.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import networkx as nx

from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_core, is_here, is_local_core_set
from envs.hardware.units import human_bytes
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import costed, extraction_for, runtime_for
from graphs.graph import GraphArrays
from graphs.selection import ConstraintError
from placer.job import Job
from placer.messages.remarks import core_refusal
from placer.progress import Progress, counter
from placer.search.compilation import compiled_beside, load_compiled_code_in_a_stage
from placer.warm_start import is_unplaced_on, placement_of

if TYPE_CHECKING:
    from envs.runtime import Runtime
    from graphs.extract import Extraction


MENTIONED_SHARE: Final = 0.1
"""Share of a limit of memory that is mentioned where workers hold it themselves."""


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
        return self.runtime is not None and all(map(is_here, self.cluster.names))

    @property
    def can_run_placed(self) -> bool:
        """Return whether the step can be run, and its ops be placed."""
        return self.can_run and self.runtime is not None and self.runtime.places


def costed_step(job: Job, progress: Progress, *, simulates: bool = True) -> CostedStep:
    """Extract the step of a loaded job and measure or look up its op costs.

    With ``simulates``, also calibrate links and compile what a simulation needs. Raises
    ConstraintError or ExtractionError if the job has pins or replicas, and ops cannot be placed.
    """
    if isinstance(job.source, nx.DiGraph):
        graph = job.constraints.applied_to(job.source, job.cluster)
        return CostedStep(
            graph=graph, cluster=job.cluster, warm_start=_warm_start(job, None, graph)
        )
    from envs.costs.roofline import check_cluster
    from envs.executors.cores.custom_ops import registrations
    from envs.runtime import calibrated
    from graphs.extract import Workload
    from graphs.extract.eager import check_has_memory

    workload, cluster = job.source, job.cluster
    assert isinstance(workload, Workload)  # loaded
    check_cluster(cluster)
    if any(map(is_here, cluster.names)):
        check_has_memory(workload)
    progress.stage("Extracting the graph")
    with compiled_beside() if simulates else nullcontext(False) as compiles:
        extraction = extraction_for(workload, cluster.names, job.extractor)
        if extraction.step_program is not None and any(map(is_local_core_set, cluster.names)):
            registrations(extraction.program)  # raises for operators that workers cannot have
        if simulates and any(map(is_local_core_set, cluster.names)):
            progress.remark(core_refusal(extraction))
        runtime = runtime_for(extraction, cluster, overlap=job.search.overlap)
        if all(map(is_here, cluster.names)):
            _check_can_be_placed(job, extraction, runtime)
        graph = job.constraints.applied_to(runtime.graph, cluster)
        warm_start = _warm_start(job, extraction, graph)
        if compiles:  # before anything is timed
            load_compiled_code_in_a_stage(progress)
    if simulates and all(map(is_here, cluster.names)) and not cluster.links:
        progress.stage("Calibrating devices")
        cluster = calibrated(cluster)
    planned = runtime.planned(cluster)
    progress.remark(_held_back(cluster, planned) if job.constraints.memory else "")
    progress.remark(_one_thread(cluster, planned))
    progress.stage("Measuring op costs")
    return CostedStep(
        graph=costed(runtime, graph, cluster, progress=counter(progress)),
        cluster=planned,
        warm_start=warm_start,
        extraction=extraction,
        runtime=runtime,
    )


def _one_thread(given: Cluster, planned: Cluster) -> str:
    """Return that one thread runs devices whose file does not say so, "" if it does.

    Without a host that is so for graphs of modules on cores, and for torch devices.
    """
    same = [{*host.devices} for host in given.hosts] == [{*host.devices} for host in planned.hosts]
    if same or is_core(given.names[0]):
        return ""
    return (
        f"One process runs all devices of {given.name}, so one thread issues their ops in the "
        "simulation, too: a process for each takes a [[host]] of its own for every device."
    )


def _held_back(given: Cluster, planned: Cluster) -> str:
    """Return how much of a limit of memory ops may not use, "" if it is little.

    Workers on cores hold it, and on torch devices it is for libraries and gaps between tensors.
    """
    devices = zip(given.devices, planned.devices, strict=True)
    sizes = [(one.name, one.memory_bytes, other.memory_bytes) for one, other in devices]
    name, limit, room = min(sizes, key=lambda size: size[2] / max(size[1], 1))
    if room > (1 - MENTIONED_SHARE) * limit:
        return ""
    held, left = human_bytes(limit - room), human_bytes(room)
    if is_core(name):
        return f"The worker of {name} holds {held} before its first op, and ops may use {left}."
    return f"On {name} {held} are for libraries and gaps between tensors, and ops may use {left}."


def _check_can_be_placed(job: Job, extraction: Extraction, runtime: Runtime) -> None:
    """Raise an exception if a job asks for what needs ops that can be placed."""
    from graphs.extract import ExtractionError

    refusal = "" if runtime.places else extraction.core_refusal
    if job.constraints.pins and refusal:
        raise ConstraintError(f"pins are for ops that can be placed, but {refusal}")
    on_cores = any(map(is_local_core_set, job.cluster.names))
    if job.replicas is not None and on_cores and extraction.step_program is None:
        refusal = f"the graph of {type(extraction.step.model).__name__} is of its modules"
    if job.replicas is not None and refusal:
        raise ExtractionError(f"replicas are planned for ops that can be placed, but {refusal}")


def unplaced_problems(step: CostedStep, job: Job, progress: Progress) -> list[Problem]:
    """Return the problems of the unplaced model, which runs on one of their devices.

    [] if nothing is run although ops can be placed, pins forbid it, or all that could be unplaced
    is placed.
    """
    if step.runtime is None or not step.can_run or job.search.backend is not None:
        return []
    if step.runtime.places and (not job.search.measure or any(step.problem.graph.allowed)):
        return []
    return step.runtime.unplaced_problems(step.problem, step.graph, counter(progress))


def _warm_start(
    job: Job, extraction: Extraction | None, graph: nx.DiGraph[str]
) -> Placement | None:
    start = job.search.start_from
    if start is None or is_unplaced_on(start, job.cluster):
        return None
    return placement_of(start, extraction, GraphArrays.from_graph(graph), job.cluster)
