"""The step time of an existing placement, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from envs.backend import Backend, StepResult, evaluated
from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_here
from envs.measurement import Measurement, contended
from envs.placement import MadeBy, Placement
from envs.problem import Problem, without_hand_over
from envs.runtime import runtime_for, simulated_result
from envs.simulator import INFEASIBLE_NS, Simulated
from envs.simulator.critical_path import critical_path, critical_path_to_list
from envs.simulator.max_load import max_load_ns
from graphs.extract import AUTO
from graphs.text import suggestion
from placer.costed_step import costed_step
from placer.job import Constraints, Job, SearchConfig, Source
from placer.messages.remarks import no_hand_over
from placer.progress import Progress, Silent, counter
from placer.result import Result
from placer.search.candidate import Kind
from placer.search.compilation import compilation_stage
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.objectives import Objective
from placer.warm_start import WarmStart, WarmStartError, check_here, warm_start_of

if TYPE_CHECKING:
    from envs.measured import Measured
    from envs.runtime import Runtime
    from graphs.extract import Workload

BACKENDS: Final = ("simulated", "measured")


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
    )


def evaluate_job(job: Job, backend: str | Backend, progress: Progress) -> Evaluation:
    """Evaluate the warm start of a job as a placement of its step."""
    start = job.search.start_from
    step = costed_step(job.loaded(progress), progress)
    assert start is not None
    if step.warm_start is None:
        assert isinstance(start, Placement)
        raise WarmStartError(
            f"the placement is the unplaced model on {', '.join(start.used_devices)}, not on "
            f"{', '.join(step.cluster.names)}: leave the devices out"
        )
    remark = ""
    if not isinstance(start, Placement) and step.extraction is not None:
        remark = start.conflict(step.extraction)
    problem = step.problem
    return _evaluate(
        without_hand_over(problem) if step.warm_start.unplaced else problem,
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
        own = problem.cluster.devices  # with the memory to plan with
        devices = tuple(
            replace(device, memory_bytes=result.limits.get(device.name, device.memory_bytes))
            for device in own
        )
        cluster = replace(problem.cluster, devices=devices)
        runtime = runtime_for(result.extraction, cluster, overlap=overlap)
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
    with compilation_stage(progress):
        predicted = result = simulated_result(runtime, problem, placement)
    if isinstance(backend, Backend):
        [result] = evaluated(backend, [placement], counter(progress))
    elif backend == "measured":
        if runtime is None:
            raise ValueError("a graph has no model to run: use backend 'simulated'")
        if elsewhere := [name for name in problem.cluster.names if not is_here(name)]:
            raise ValueError(f"{elsewhere[0]} is not on this machine: use backend 'simulated'")
        progress.stage("Running it for real")
        expected_s = predicted.step_s if predicted.feasible else 1.0
        with runtime.backend(problem, [expected_s]) as measured:
            [result] = measured.evaluate([placement], counter(progress))
        remark = " ".join(filter(None, (remark, no_hand_over(problem, placement))))
    if result.measurement is not None and not result.measurement.counts:
        raise KeyboardInterrupt
    if placement.replicas is not None and len(placement.replicas.groups) > 1:
        count = len(placement.replicas.groups)
        one = f"This is the step of one of {count} replicas, without reductions of gradients."
        remark = " ".join(filter(None, (remark, one)))
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
    kind = Kind.UNPLACED if placement.unplaced else Kind.OTHER
    best = replace(
        evaluator.candidate(kind, devices, priority, name=name),
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
            unplaced=False,
        )
        other = replace(candidate, prediction=objective.predict(simulated, made))
        is_same = (
            np.array_equal(candidate.devices, devices) and other.predicted_s == best.predicted_s
        )
        if best.is_unplaced or not is_same:
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
