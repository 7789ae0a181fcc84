"""Steps with their op costs, ready to search, and the step time of an existing placement.

:func:`costed_step` is the way from a job to its graph with costs, for all commands and functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import networkx as nx
import numpy as np

from envs.backend import Backend, StepResult
from envs.compiled import loading_stage
from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_here
from envs.measurement import Measurement, contended
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.runtime import costed, runtime_for, simulated_result
from envs.simulator import INFEASIBLE_NS, Simulated
from envs.simulator.critical_path import critical_path, critical_path_to_list
from envs.simulator.max_load import max_load_ns
from graphs.extract import AUTO
from graphs.graph import GraphArrays
from graphs.text import suggestion
from placer.job import Constraints, Job, SearchConfig, Source
from placer.messages import no_hand_over
from placer.progress import Progress, Silent, counter
from placer.result import Result
from placer.search.candidate import Kind
from placer.search.compilation import compiled_beside, load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.objectives import Objective
from placer.warm_start import WarmStart, check_here, placement_of, warm_start_of

if TYPE_CHECKING:
    from envs.measured import Measured
    from envs.runtime import Runtime
    from graphs.extract import Extraction, Workload

BACKENDS: Final = ("simulated", "measured")


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
        runtime = runtime_for(extraction, cluster, overlap=job.search.overlap)
        graph = job.constraints.applied_to(runtime.graph, cluster)
        warm_start = _warm_start(job, extraction, graph)
        if compiles:  # before anything is timed
            progress.stage(loading_stage())
            load_compiled_code()
    if simulates and all(map(is_here, cluster.names)) and not cluster.links:
        progress.stage("Calibrating devices")
        cluster = calibrated(cluster, again=job.fresh)
    progress.stage("Measuring op costs")
    return CostedStep(
        graph=costed(runtime, graph, cluster, fresh=job.fresh, progress=counter(progress)),
        cluster=runtime.planned(cluster),
        warm_start=warm_start,
        extraction=extraction,
        runtime=runtime,
    )


def unplaced_problem(step: CostedStep, job: Job, progress: Progress) -> Problem | None:
    """Return the problem of the unplaced model, the graph on its one device.

    None if nothing is run, pins forbid it, or it is the placement on one device.
    """
    search = job.search
    if not (step.can_run and search.measure) or search.backend is not None:
        return None
    if search.objective.micro_batches != 1 or any(step.problem.graph.allowed):
        return None
    assert step.runtime is not None
    cluster = step.runtime.unplaced(step.cluster)
    if cluster is None:
        return None
    advance = counter(progress)
    graph = costed(step.runtime, step.graph, cluster, fresh=job.fresh, progress=advance)
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def _warm_start(
    job: Job, extraction: Extraction | None, graph: nx.DiGraph[str]
) -> Placement | None:
    start = job.search.start_from
    if start is None:
        return None
    return placement_of(start, extraction, GraphArrays.from_graph(graph), job.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The step of one placement: the result of a backend beside that of the simulator.

    ``step_s`` is inf for a placement that is not ``feasible``; ``why`` then gives the reason.
    """

    placement: Placement
    problem: Problem
    result: StepResult  # of the backend
    predicted: StepResult  # of the simulator; the result itself if nothing else was asked
    cost_source: Mapping[str, str] = field(default_factory=dict)  # {device kind: source}
    remark: str = ""  # what is missing in the step, why accelerate could not run the device map

    @property
    def step_s(self) -> float:
        """Return the step time; inf if the placement is not feasible."""
        return self.result.step_s

    @property
    def feasible(self) -> bool:
        """Return whether the placement can run."""
        return self.result.feasible

    @property
    def why(self) -> str:
        """Return why the placement is not feasible, or ""."""
        return self.result.why

    @property
    def measurement(self) -> Measurement | None:
        """Return the runs of the placement, None if nothing was run."""
        return self.result.measurement

    @property
    def contended(self) -> bool:
        """Return whether other processes used the cores: ``step_s`` is then CPU-clock time."""
        return self.measurement is not None and contended([self.measurement])

    @property
    def max_load_s(self) -> float | None:
        """Return the largest load of a device, see objective "max-load"; None if infeasible."""
        load_ns = int(max_load_ns(self.problem, self.placement.arrays()[0])[0])
        return load_ns / 1e9 if load_ns < INFEASIBLE_NS else None

    def __str__(self) -> str:
        """Return the step time, or why there is none."""
        return f"{self.step_s * 1e3:.4g} ms" if self.feasible else f"not feasible: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data for JSON, with the critical path of the simulation."""
        result = self.result
        answer = {
            "step_s": result.step_s if result.feasible else None,
            "micro_batches": self.placement.micro_batches,
            "in_flight": self.placement.in_flight,
            "period_s": result.period_s,
            "why_no_period": result.no_period_reason,
            "max_load_s": self.max_load_s,
            "feasible": result.feasible,
            "why": result.why,
            "peak_memory_bytes": dict(result.peak_memory_bytes),
            "parts": dict(result.parts),
            "critical_path": self._critical_path() if self.predicted.feasible else [],
        }
        if self.predicted is result:
            return answer
        return answer | {
            "rounds": 0 if result.measurement is None else len(result.measurement.wall_s),
            "predicted": {
                "step_s": self.predicted.step_s if self.predicted.feasible else None,
                "feasible": self.predicted.feasible,
                "why": self.predicted.why,
                "peak_memory_bytes": dict(self.predicted.peak_memory_bytes),
            },
            "remarks": [self.remark] if self.remark else [],
            "cost_source": dict(self.cost_source),
        }

    def _critical_path(self) -> list[dict[str, Any]]:
        whole, schedule = Simulated(self.problem).run(self.placement)
        return critical_path_to_list(whole, critical_path(whole, schedule))


def measured(
    workload: Workload, devices: str | Path | Cluster = "auto", *, rounds: int = 7
) -> Measured:
    """Return a backend that runs placements of a workload on devices of this machine.

    It times all placements of one ``evaluate`` in the same rounds. Close it after use::

        with placer.measured(workload, "core:0,core:1") as backend:
            first, second = backend.evaluate([one_placement, another_placement])

    Args:
        workload: the model with its inputs; its ops are timed where their costs are not known.
        devices: names such as ``"core:0,core:1"``, a cluster file or a Cluster.
        rounds: counted runs of every placement.

    Raises:
        ExtractionError: the model cannot be extracted.
        ValueError: a device is not on this machine.
        WorkerError: the workers do not start.
    """
    step = costed_step(Job.of(workload, devices), Silent())
    if step.runtime is None or not step.can_run:
        raise ValueError(f"not all of {', '.join(step.cluster.names)} are here to run the model")
    return step.runtime.backend(step.problem, rounds=rounds)


def evaluation_job(
    placement: WarmStart | Mapping[str, int | str] | str | Path,
    source: Source | str | Path,
    devices: str | Path | Cluster | None = None,
    *,
    memory: Mapping[str, int | str] | None = None,
    overlap: bool = False,
    extractor: str = AUTO,
    fresh: bool = False,
) -> Job:
    """Return the job of evaluating a placement of a source, by default on its own devices."""
    start = warm_start_of(placement)
    if devices is None:
        check_here(start)
        devices = ",".join(start.device_names)
    return Job.of(
        source,
        devices,
        search=SearchConfig(policy=None, start_from=start, overlap=overlap),
        constraints=Constraints(memory=memory or {}),
        extractor=extractor,
        fresh=fresh,
    )


def evaluate_job(job: Job, backend: str | Backend, progress: Progress) -> Evaluation:
    """Evaluate the warm start of a job as a placement of its step."""
    start = job.search.start_from
    step = costed_step(job.loaded(progress), progress)
    assert start is not None
    assert step.warm_start is not None
    remark = ""
    if not isinstance(start, Placement) and step.extraction is not None:
        remark = start.conflict(step.extraction)
    return _evaluate(
        step.problem,
        step.warm_start,
        step.runtime,
        backend,
        progress,
        cost_source=step.graph.graph["cost_source"],
        remark=remark,
    )


def evaluate_result(
    result: Result, backend: str | Backend, progress: Progress, *, overlap: bool = False
) -> Evaluation:
    """Evaluate the placement of an optimization on its own devices."""
    problem, runtime = result.problem, None
    if result.extraction is not None and backend == "measured":
        runtime = runtime_for(result.extraction, problem.cluster, overlap=overlap)
    return _evaluate(
        problem, result.placement, runtime, backend, progress, cost_source=result.cost_source
    )


def _evaluate(
    problem: Problem,
    placement: Placement,
    runtime: Runtime | None,
    backend: str | Backend,
    progress: Progress,
    *,
    cost_source: Mapping[str, str],
    remark: str = "",
) -> Evaluation:
    progress.stage(loading_stage())
    predicted = result = simulated_result(runtime, problem, placement)
    if isinstance(backend, Backend):
        [result] = backend.evaluate([placement], counter(progress))
    elif backend == "measured":
        if runtime is None:
            raise ValueError("a graph has no model to run: use backend 'simulated'")
        if elsewhere := [name for name in problem.cluster.names if not is_here(name)]:
            raise ValueError(f"{elsewhere[0]} is not on this machine: use backend 'simulated'")
        progress.stage("Running it for real")
        expected_s = predicted.step_s if predicted.feasible else 1.0
        with runtime.backend(problem, [expected_s]) as measured:
            [result] = measured.evaluate([placement], counter(progress))
        remark = " ".join(filter(None, (remark, no_hand_over(problem))))
    if result.measurement is not None and not result.measurement.counts:
        raise KeyboardInterrupt
    return Evaluation(
        placement=placement,
        problem=problem,
        result=result,
        predicted=predicted,
        cost_source=cost_source,
        remark=remark,
    )


def check_backend(backend: str | Backend) -> None:
    """Check that a backend has a known name or can evaluate."""
    if not isinstance(backend, Backend) and backend not in BACKENDS:
        raise ValueError(
            f"there is no backend {backend!r}: there are {' and '.join(BACKENDS)}, and objects "
            f"with a method evaluate{suggestion(str(backend), BACKENDS)}"
        )


def reviewed(
    problem: Problem, placement: Placement, cost_source: Mapping[str, str] | None = None
) -> Result:
    """Return an optimization result with this placement as the best, compared to the heuristics.

    Nothing is searched or run: measured times are those recorded in the placement.
    """
    placement.check(problem.graph, problem.cluster)
    objective = Objective(
        name=placement.objective,
        micro_batches=placement.micro_batches,
        in_flight=placement.in_flight,
    )
    simulated = Simulated(problem)
    devices, priority = placement.arrays()
    evaluator, name = Evaluator(problem), placement.made_by.placer or "this placement"
    best = replace(
        evaluator.candidate(Kind.OTHER, devices, priority, name=name),
        prediction=objective.predict(simulated, placement),
    )
    candidates = [best]
    for candidate in heuristics(evaluator):
        made = replace(
            placement,
            devices=tuple(candidate.devices.tolist()),
            priority=tuple(candidate.priority.tolist()),
            made_by=MadeBy(placer=candidate.name),
            predicted=None,
            measured=None,
            replicas=None,
        )
        other = replace(candidate, prediction=objective.predict(simulated, made))
        is_same = (
            np.array_equal(candidate.devices, devices) and other.predicted_s == best.predicted_s
        )
        if not is_same:
            candidates.append(other)
    return Result(
        placement=placement,
        problem=problem,
        candidates=tuple(sorted(candidates, key=lambda candidate: candidate.predicted_s)),
        best=best,
        lower_bound_s=objective.lower_bound_s(problem),
        search_s=0.0,
        stopped=False,
        cost_source=dict(cost_source or {}),
    )
