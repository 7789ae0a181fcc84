"""The main job: extract, measure costs, search, run the best for real, choose."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import networkx as nx
import numpy as np

import placer
from envs.bounds import why_too_large
from envs.calibrate import calibrated
from envs.cluster import Cluster
from envs.discover import check_cores
from envs.executor.pool import WorkerError
from envs.measured import Measured, Measurement, run_order
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.extract import Extraction, Step, extract
from graphs.graph import GraphArrays
from placer.costing import measured_graph
from placer.demands import demanded
from placer.interrupt import Interrupt
from placer.objectives import Objective
from placer.outcome import Optimization, PlacementError, Row, choose
from placer.report.progress import Progress, Silent
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.portfolio import Proposer, load_compiled_code

MEASURED_CANDIDATES: Final = 5
"""How many of the best are run for real, besides the best single device."""
MEASURED_S: Final = 1.5
FEWEST_ROUNDS: Final = 7
MOST_ROUNDS: Final = 41


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to optimize."""

    budget: Budget = field(default_factory=lambda: Budget(seconds=20.0))
    seed: int = 0
    policy: Proposer | None = None  # None: search without a learned policy
    measure: bool = True
    objective: Objective = field(default_factory=Objective)
    keep_together: Sequence[str] = ()  # patterns: what matches one shares a device
    pins: Mapping[str, str] = field(default_factory=dict)  # {pattern: device name}


def optimize_step(
    step: Step, cluster: Cluster, options: Options, progress: Progress | None = None
) -> Optimization:
    """Place one step of a model on this machine's devices.

    Args:
        step: the model and its example inputs.
        cluster: devices ``core:*``; without links, speeds of devices and links are calibrated.
        options: budget, seed and what to leave out.
        progress: hears what is going on.

    Raises:
        ExtractionError: the model cannot be exported.
        DemandError: an option names ops or devices that are not there, or contradicts another.
        ValueError: a device is not there.
        PlacementError: the model fits nowhere, or nothing could be run.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    check_cores(cluster.names)
    with Interrupt() as interrupt:
        hear.stage("Extracting the graph")
        extraction = extract(step)
        graph = demanded(extraction.graph, cluster, options.keep_together, options.pins)
        hear.stage("Calibrating devices")
        cluster = cluster if cluster.links else calibrated(cluster)
        hear.stage("Measuring op costs")
        graph = measured_graph(extraction, graph, cluster, hear)
        problem = Problem.of(GraphArrays.from_graph(graph), cluster)
        return _decided(problem, options, interrupt, hear, extraction)


def optimize_graph(
    graph: nx.DiGraph[str], cluster: Cluster, options: Options, progress: Progress | None = None
) -> Optimization:
    """Place a graph with known costs; ends with the simulator's answer, nothing is run.

    Raises:
        DemandError: an option names ops or devices that are not there, or contradicts another.
        ValueError: an op has no cost on any device of the cluster.
        PlacementError: the graph fits nowhere.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    with Interrupt() as interrupt:
        graph = demanded(graph, cluster, options.keep_together, options.pins)
        problem = Problem.of(GraphArrays.from_graph(graph), cluster)
        return _decided(problem, options, interrupt, hear, None)


def _decided(
    problem: Problem,
    options: Options,
    interrupt: Interrupt,
    hear: Progress,
    extraction: Extraction | None,
) -> Optimization:
    """Search, run the best if there is something to run, choose.

    Once the search has begun nothing is lost: Ctrl-C ends the stage, and where workers cannot be
    started the prediction decides.
    """
    if why := why_too_large(problem):
        raise PlacementError(f"The model fits nowhere: {why}.")
    hear.stage("Loading compiled code (the first time it is compiled, 30 s)")
    load_compiled_code()
    rows: list[Row] = []
    runs, trouble = _Runs(), ""
    began = ended = time.perf_counter()
    try:
        with interrupt.polled():
            hear.stage("Searching placements")
            rows = _searched(problem, options, interrupt, hear)
            ended = time.perf_counter()
        if extraction is not None and options.measure and not interrupt.requested:
            hear.stage("Running the best for real")
            runs = _run_best(rows, extraction, problem, hear)
    except KeyboardInterrupt:
        interrupt.requested = True
        if not rows:
            raise
    except (WorkerError, OSError) as error:
        trouble = str(error)
    with interrupt.polled():
        rows = [replace(row, measurement=runs.of_row.get(i)) for i, row in enumerate(rows)]
        best = choose(rows)
        return _recorded(
            Optimization(
                placement=best.placement,
                problem=problem,
                rows=tuple(rows),
                best=best,
                lower_bound_s=options.objective.lower_bound_s(problem),
                search_s=ended - began,
                stopped=interrupt.requested or runs.interrupted,
                extraction=extraction,
                all_cores=runs.all_cores,
                trouble=trouble,
            )
        )


def _searched(
    problem: Problem, options: Options, interrupt: Interrupt, hear: Progress
) -> list[Row]:
    candidates = options.objective.search(
        problem,
        options.budget,
        options.seed,
        options.policy,
        progress=hear.advance,
        should_stop=interrupt.asked,
    )
    simulated = Simulated(problem)
    return [_row(simulated, candidate, options) for candidate in candidates]


def _row(simulated: Simulated, candidate: Candidate, options: Options) -> Row:
    """A candidate with its schedule; the placement's priorities spell the simulated order out."""
    problem, objective = simulated.problem, options.objective
    schedule = simulated.simulator.run(candidate.devices, candidate.priority)
    priority = np.empty(problem.op_count)
    priority[run_order(problem, schedule.start_ns)] = np.arange(problem.op_count, 0, -1)
    made_by = MadeBy(
        placer=candidate.name,
        seed=options.seed,
        budget=str(options.budget),
        version=placer.__version__,
    )
    placement = replace(
        Placement.of(problem.graph, problem.cluster, candidate.devices, priority, made_by),
        objective=objective.name,
        micro_batches=objective.micro_batches,
    )
    prediction = objective.predict(simulated, placement)
    return Row(
        name=candidate.name,
        placement=placement,
        predicted_s=prediction.value_s,
        peak_memory_bytes=dict(prediction.peak_memory_bytes),
        why=prediction.why,
        times_s=prediction.times_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What running candidates for real gave."""

    of_row: Mapping[int, Measurement] = field(default_factory=dict)
    all_cores: Measurement | None = None
    interrupted: bool = False


def _run_best(
    rows: Sequence[Row], extraction: Extraction, problem: Problem, hear: Progress
) -> _Runs:
    """Run the best few and the best single devices in turn.

    Raises:
        WorkerError: the workers do not come up.
    """
    chosen = worth_running(rows, problem.cluster)
    if not chosen:
        return _Runs()
    latency_s = max((link.latency_s for link in problem.cluster.links), default=0.0)
    timeout_s = 60.0 + 100.0 * max((rows[i].predicted_s for i in chosen), default=0.0)
    with Measured(
        extraction,
        problem,
        latency_s=latency_s,
        rounds=rounds_for(rows[chosen[0]].predicted_s),
        step_timeout_s=timeout_s,
    ) as backend:
        measurements = backend.measure(
            [rows[i].placement for i in chosen],
            progress=lambda done, total: hear.advance(done / total),
            reference=True,
        )
        return _Runs(
            of_row={i: m for i, m in zip(chosen, measurements, strict=True) if m.counts},
            all_cores=backend.reference,
            interrupted=backend.interrupted,
        )


def rounds_for(step_s: float) -> int:
    """How often a candidate is run: short steps scatter more, and cost less."""
    return int(min(max(MEASURED_S / step_s, FEWEST_ROUNDS), MOST_ROUNDS)) if step_s else MOST_ROUNDS


def worth_running(rows: Sequence[Row], cluster: Cluster) -> list[int]:
    """Indices of the candidates to be run: the best single device of each kind, the best others."""
    kind_of = {device.name: device.kind for device in cluster.devices}
    feasible = [i for i, row in enumerate(rows) if np.isfinite(row.predicted_s)]
    by_time = sorted(feasible, key=lambda i: rows[i].predicted_s)
    singles: dict[str, int] = {}
    for i in by_time:
        if rows[i].is_single:
            placement = rows[i].placement
            singles.setdefault(kind_of[placement.device_names[placement.devices[0]]], i)
    others = [i for i in by_time if not rows[i].is_single]
    return [*singles.values(), *others[:MEASURED_CANDIDATES]]


def _recorded(found: Optimization) -> Optimization:
    """The same with the best row's times in the placement."""
    best, single, seen = found.best, found.single, found.best.measurement
    predicted = {
        "step_s": best.predicted_s,
        **best.times_s,
        "peak_memory_bytes": best.peak_memory_bytes,
        "lower_bound_s": found.lower_bound_s,
    }
    measured: dict[str, float] | None = None
    if seen is not None:
        measured = {
            "step_s": found.step_s(best),
            "wall_median_s": seen.median_s,
            "wall_min_s": seen.min_s,
            "spread": seen.spread,
            "rebuilt_s": seen.rebuilt_median_s,
            "contention": seen.contention,
            "rounds": len(seen.wall_s),
        }
        if single is not None and single.measurement is not None:
            measured["single_device_step_s"] = found.step_s(single)
        if found.all_cores is not None and found.all_cores.ok:
            measured["all_cores_min_s"] = found.all_cores.min_s
    placement = replace(found.placement, predicted=predicted, measured=measured)
    return replace(found, placement=placement)
