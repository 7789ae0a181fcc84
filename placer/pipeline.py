"""The main job: extract, measure costs, search, run the best for real, choose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import networkx as nx
import numpy as np

import placer
from envs.bounds import lower_bound_ns
from envs.calibrate import calibrated, profile_ops
from envs.cluster import Cluster
from envs.measured import Measured, Measurement, run_order
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from graphs.costs import with_costs
from graphs.extract import Extraction, Step, extract
from graphs.graph import GraphArrays
from placer.interrupt import Interrupt
from placer.outcome import Optimization, Row, choose
from placer.report.progress import Progress, Silent
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.portfolio import Proposer, load_compiled_code, search

MEASURED_CANDIDATES: Final = 5
"""How many of the best are run for real, besides the best single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to optimize."""

    budget: Budget = field(default_factory=lambda: Budget(seconds=20.0))
    seed: int = 0
    policy: Proposer | None = None  # None: search without a learned policy
    measure: bool = True
    rounds: int = 7


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
        ValueError: a device is not there.
        PlacementError: the model fits nowhere, or nothing could be run.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    with Interrupt() as interrupt:
        hear.stage("Extracting the graph")
        extraction = extract(step)
        hear.stage("Calibrating devices")
        cluster = cluster if cluster.links else calibrated(cluster)
        hear.stage("Measuring op costs")
        costs_s = profile_ops(
            extraction, cluster, progress=lambda done, total: hear.advance(done / total)
        )
        graph = with_costs(
            extraction.graph, costs_s, dict.fromkeys(costs_s, cluster.devices[0].source)
        )
        problem = Problem.of(GraphArrays.from_graph(graph), cluster)
        return _decided(problem, options, interrupt, hear, extraction)


def optimize_graph(
    graph: nx.DiGraph[str], cluster: Cluster, options: Options, progress: Progress | None = None
) -> Optimization:
    """Place a graph with known costs; ends with the simulator's answer, nothing is run.

    Raises:
        ValueError: an op has no cost on any device of the cluster.
        PlacementError: the graph fits nowhere.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    with Interrupt() as interrupt:
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

    Once the search has begun, Ctrl-C ends the stage and what was found until then counts.
    """
    hear.stage("Loading compiled code")
    load_compiled_code()
    rows: list[Row] = []
    began = ended = time.perf_counter()
    try:
        with interrupt.polled():
            hear.stage("Searching placements")
            rows = _searched(problem, options, interrupt, hear)
            ended = time.perf_counter()
        if extraction is not None and options.measure and not interrupt.requested:
            hear.stage("Running the best for real")
            rows = _measured(rows, extraction, problem, options, interrupt, hear)
    except KeyboardInterrupt:
        interrupt.requested = True
        if not rows:
            raise
    return _outcome(rows, problem, ended - began, interrupt.requested, extraction)


def _searched(
    problem: Problem, options: Options, interrupt: Interrupt, hear: Progress
) -> list[Row]:
    candidates = search(
        problem,
        options.budget,
        options.seed,
        policy=options.policy,
        progress=hear.advance,
        should_stop=interrupt.asked,
    )
    simulator = Simulator(problem)
    return [_row(problem, simulator, candidate, options) for candidate in candidates]


def _row(problem: Problem, simulator: Simulator, candidate: Candidate, options: Options) -> Row:
    """A candidate with its schedule; the placement's priorities spell the simulated order out."""
    schedule = simulator.run(candidate.devices, candidate.priority)
    feasible = candidate.step_ns < INFEASIBLE_NS
    priority = np.empty(problem.op_count)
    priority[run_order(problem, schedule.start_ns)] = np.arange(problem.op_count, 0, -1)
    made_by = MadeBy(
        placer=candidate.name,
        seed=options.seed,
        budget=str(options.budget),
        version=placer.__version__,
    )
    return Row(
        name=candidate.name,
        placement=Placement.of(
            problem.graph, problem.cluster, candidate.devices, priority, made_by
        ),
        predicted_s=candidate.step_ns * 1e-9 if feasible else np.inf,
        peak_memory_bytes=dict(
            zip(problem.cluster.names, map(int, schedule.peak_bytes), strict=True)
        ),
        why=schedule.why,
    )


def _measured(
    rows: list[Row],
    extraction: Extraction,
    problem: Problem,
    options: Options,
    interrupt: Interrupt,
    hear: Progress,
) -> list[Row]:
    """The rows, of which the best and the best single device were run."""
    chosen = worth_running(rows)
    latency_s = max((link.latency_s for link in problem.cluster.links), default=0.0)
    timeout_s = 60.0 + 100.0 * max((rows[i].predicted_s for i in chosen), default=0.0)
    with Measured(
        extraction,
        problem,
        latency_s=latency_s,
        rounds=options.rounds,
        step_timeout_s=timeout_s,
    ) as backend:
        measurements = backend.measure(
            [rows[i].placement for i in chosen],
            progress=lambda done, total: hear.advance(done / total),
        )
        interrupt.requested |= backend.interrupted
    seen: dict[int, Measurement] = dict(zip(chosen, measurements, strict=True))
    return [
        replace(row, measurement=seen[i]) if i in seen and seen[i].counts else row
        for i, row in enumerate(rows)
    ]


def worth_running(rows: Sequence[Row]) -> list[int]:
    """Indices of the candidates to be run: the best single device, and the best few others."""
    feasible = [i for i, row in enumerate(rows) if np.isfinite(row.predicted_s)]
    by_time = sorted(feasible, key=lambda i: rows[i].predicted_s)
    single = [i for i in by_time if rows[i].is_single][:1]
    return [*single, *[i for i in by_time if not rows[i].is_single][:MEASURED_CANDIDATES]]


def _outcome(
    rows: Sequence[Row],
    problem: Problem,
    search_s: float,
    stopped: bool,
    extraction: Extraction | None,
) -> Optimization:
    best = choose(rows)
    bound_s = lower_bound_ns(problem) * 1e-9
    found = Optimization(
        placement=best.placement,
        problem=problem,
        rows=tuple(rows),
        best=best,
        lower_bound_s=bound_s,
        search_s=search_s,
        stopped=stopped,
        extraction=extraction,
    )
    predicted = {
        "step_s": best.predicted_s,
        "peak_memory_bytes": best.peak_memory_bytes,
        "lower_bound_s": bound_s,
    }
    return replace(
        found,
        placement=replace(best.placement, predicted=predicted, measured=_record(found)),
    )


def _record(found: Optimization) -> dict[str, float] | None:
    """The measured part of the placement file."""
    seen = found.best.measurement
    if seen is None:
        return None
    single = found.single
    record = {
        "step_s": seen.step_s(contended=found.loaded),
        "wall_median_s": seen.median_s,
        "wall_min_s": seen.min_s,
        "spread": seen.spread,
        "rebuilt_s": seen.rebuilt_median_s,
        "contention": seen.contention,
        "rounds": len(seen.wall_s),
    }
    if single is not None and single.measurement is not None:
        record["single_device_step_s"] = found.step_s(single)
    return record
