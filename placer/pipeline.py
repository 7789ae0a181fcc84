"""The optimization pipeline: extract, measure costs, search, run the best candidates, choose."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import networkx as nx
import numpy as np

import placer
from envs.bounds import why_apart, why_too_large
from envs.cluster import Cluster
from envs.compiled import loading_stage
from envs.discover import is_here
from envs.executor.worker_error import WorkerError
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulated
from envs.simulator.schedule import run_order
from graphs.coarsen import Coarsened, coarsen
from graphs.graph import GraphArrays
from placer.interrupt import Interrupt
from placer.job import Job, SearchConfig
from placer.outcome import Optimization, PlacementError, Row, choose
from placer.record import with_record
from placer.report.progress import Progress, Silent
from placer.running import Runs, joined, overfull, run_best, with_less_memory
from placer.search.candidate import Candidate
from placer.search.compiling import compiled_beside, load_compiled_code
from placer.search.heuristics import ETF_NAME, HEFT_NAME, heuristics
from placer.search.judge import Judge
from placer.search.trail import Trail, recorded
from placer.warm_start import WARM_START, placement_of

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.rigs import Rig

SMALLER: Final = (0.85, 0.7)
"""Shares of device memory to search with, in turn, if candidates run out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outset:
    """Inputs of a search besides its problem."""

    coarse: Coarsened | None  # groups of ops to place; None: single ops
    start: Placement | None  # warm start


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedStep:
    """An extracted step with op costs, ready for a search."""

    extraction: Extraction
    rig: Rig
    graph: nx.DiGraph[str]  # with costs and user constraints
    cluster: Cluster  # calibrated, with the memory that placements may use
    start: Placement | None  # warm start


def optimize_job(job: Job, progress: Progress | None = None) -> Optimization:
    """Place the step of a workload, or a graph with known costs.

    If all devices of a workload are on this machine, the best candidates are run; otherwise the
    simulated step time decides. Devices on this machine without links are calibrated, devices
    elsewhere need rates, see envs/roofline.py.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device.
        ConstraintError: a constraint names ops or devices that do not exist, or contradicts
            another.
        ValueError: a device is neither on this machine nor described, cores are mixed with torch
            devices, an op has no cost on any device, the warm start belongs to another model,
            graph or cluster, or copies cannot overlap.
        PlacementError: no placement that fits was found, or nothing could be run.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    with Interrupt() as interrupt:
        if isinstance(job.source, nx.DiGraph):
            return _optimize_graph(job, job.source, interrupt, hear)
        all_here = all(map(is_here, job.cluster.names))
        known = costed_step(job, hear)
        problem = Problem.of(GraphArrays.from_graph(known.graph), known.cluster)
        runs = all_here and known.rig.runs
        found = _decided(
            problem,
            job.search,
            interrupt,
            hear,
            known.extraction,
            known.rig if runs else None,
            outset=_Outset(coarse=grouped(known.graph, job.search), start=known.start),
        )
        return replace(found, cost_source=known.graph.graph["cost_source"])


def _optimize_graph(
    job: Job, graph: nx.DiGraph[str], interrupt: Interrupt, hear: Progress
) -> Optimization:
    graph = job.constraints.applied_to(graph, job.cluster)
    problem = Problem.of(GraphArrays.from_graph(graph), job.cluster)
    outset = _Outset(coarse=grouped(graph, job.search), start=_start(job, None, graph, job.cluster))
    found = _decided(problem, job.search, interrupt, hear, outset=outset)
    return replace(found, cost_source=graph.graph["cost_source"])


def costed_step(job: Job, hear: Progress) -> CostedStep:
    """Extract the step of a job's workload and measure or look up its op costs.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device.
        ConstraintError: a constraint names ops or devices that do not exist, or contradicts
            another.
        ValueError: as for :func:`optimize_job`.
    """
    from envs.calibrate import calibrated
    from envs.op_costs import check_cluster
    from graphs.extract import Step, extract
    from graphs.extract.fake import check_has_memory
    from placer.rigs import rig_for

    step, cluster = job.source, job.cluster
    assert isinstance(step, Step)  # loaded
    check_cluster(cluster)
    if any(map(is_here, cluster.names)):
        check_has_memory(step)
    hear.stage("Extracting the graph")
    with compiled_beside() as compiles:
        extraction = extract(step, job.extractor)
        rig = rig_for(extraction, cluster, overlap=job.search.overlap)
        graph = job.constraints.applied_to(rig.graph, cluster)
        start = _start(job, extraction, graph, cluster)
        if compiles:  # before anything is timed
            hear.stage(loading_stage())
            load_compiled_code()
    if all(map(is_here, cluster.names)) and not cluster.links:
        hear.stage("Calibrating devices")
        cluster = calibrated(cluster, again=job.fresh)
    hear.stage("Measuring op costs")
    return CostedStep(
        extraction=extraction,
        rig=rig,
        graph=rig.costed(graph, cluster, hear, fresh=job.fresh),
        cluster=rig.planned(cluster),
        start=start,
    )


def optimize_problem(
    problem: Problem,
    search: SearchConfig,
    progress: Progress | None = None,
    *,
    coarse: Coarsened | None = None,
) -> Optimization:
    """Place the ops of a problem, or the given groups of them; nothing is run.

    Raises:
        PlacementError: no placement that fits was found.
        KeyboardInterrupt: stopped before there was any placement.
    """
    with Interrupt() as interrupt:
        outset = _Outset(coarse=coarse, start=None)
        return _decided(problem, search, interrupt, progress or Silent(), outset=outset)


def _start(
    job: Job, extraction: Extraction | None, graph: nx.DiGraph[str], cluster: Cluster
) -> Placement | None:
    start = job.search.start_from
    if start is None:
        return None
    return placement_of(start, extraction, GraphArrays.from_graph(graph), cluster)


def _decided(
    problem: Problem,
    search: SearchConfig,
    interrupt: Interrupt,
    hear: Progress,
    extraction: Extraction | None = None,
    rig: Rig | None = None,
    *,
    outset: _Outset,
) -> Optimization:
    """Search, run the best candidates if there is a runtime, and choose.

    From the search on no result is lost: Ctrl-C only ends the current stage, and if the workers
    cannot be started, the prediction decides.
    """
    if why := why_too_large(problem):
        raise PlacementError(f"The model fits nowhere: {why}.")
    if why := why_apart(problem):
        raise PlacementError(f"The model runs nowhere: {why}.")
    hear.stage(loading_stage())
    load_compiled_code()
    rows: list[Row] = []
    runs, trouble, trail = Runs(), "", Trail()
    bounds_s: list[float] = []
    began = ended = ran = time.perf_counter()
    try:
        with interrupt.polled(), recorded() as trail:
            hear.stage("Searching placements")
            rows = _searched(problem, search, interrupt, hear, rig, outset)
            ended = ran = time.perf_counter()
            bounds_s = [row.bound_s for row in rows if row.bound_s is not None]
        if rig is not None and search.measure and not interrupt.requested:
            hear.stage("Running the best for real")
            runs = run_best(rows, rig, problem, hear)
            for share in SMALLER:
                if runs.interrupted or not overfull(rows, runs):
                    break
                hear.stage(f"Memory did not suffice: searching again for {share:.0%} of it")
                smaller = with_less_memory(problem, share)
                with interrupt.polled(), recorded() as again:
                    more = _searched(smaller, search, interrupt, hear, rig, outset)
                if not any(np.isfinite(row.predicted_s) for row in more):
                    break
                trail = again
                rows, runs = joined(rows, runs, more, run_best(more, rig, smaller, hear))
    except KeyboardInterrupt:
        interrupt.requested = True
        if not rows:
            raise
    except (WorkerError, OSError) as error:
        trouble = str(error)
    if rig is not None and search.measure:
        ran = time.perf_counter()
    with interrupt.polled():
        rows = [replace(row, measurement=runs.of_row.get(i)) for i, row in enumerate(rows)]
        best = choose(rows)
        return with_record(
            Optimization(
                placement=best.placement,
                problem=problem,
                rows=tuple(rows),
                best=best,
                lower_bound_s=max(search.objective.lower_bound_s(problem), *bounds_s, 0.0),
                solved=bool(bounds_s),
                search_s=ended - began,
                measuring_s=ran - ended,
                stopped=interrupt.requested or runs.interrupted,
                extraction=extraction,
                all_cores=runs.all_cores,
                trail=trail,
                trouble=trouble,
            )
        )


def grouped(graph: nx.DiGraph[str], search: SearchConfig) -> Coarsened | None:
    """Return the ops merged into groups, None if the search asks for none."""
    return None if search.groups is None else coarsen(graph, most_groups=search.groups)


def _searched(
    problem: Problem,
    search: SearchConfig,
    interrupt: Interrupt,
    hear: Progress,
    rig: Rig | None,
    outset: _Outset,
) -> list[Row]:
    searched = problem
    if outset.coarse is not None:
        searched = Problem.of(GraphArrays.from_graph(outset.coarse.graph), problem.cluster)
    candidates = search.objective.search(
        searched,
        search.budget,
        search.seed,
        search.placer,
        progress=hear.advance,
        should_stop=interrupt.asked,
    )
    if outset.coarse is not None:
        candidates = [_expanded(plan, outset.coarse) for plan in candidates]
        candidates += _by_op(problem)  # groups may exclude good placements
    if outset.start is not None:
        candidates.append(Judge(problem).candidate(WARM_START, *outset.start.arrays()))
    simulated = Simulated(problem)
    return [_row(simulated, candidate, search, rig) for candidate in candidates]


def _by_op(problem: Problem) -> list[Candidate]:
    found = heuristics(Judge(problem))
    schedulers = [plan for plan in found if plan.name in (HEFT_NAME, ETF_NAME)]
    return [replace(plan, name=f"{plan.name} by op") for plan in schedulers]


def _expanded(plan: Candidate, coarse: Coarsened) -> Candidate:
    """Return a candidate for groups as one for their ops; its bound does not carry over."""
    devices, priority = coarse.expand(plan.devices, plan.priority)
    return replace(plan, devices=devices, priority=priority, bound_ns=None)


def _row(simulated: Simulated, candidate: Candidate, search: SearchConfig, rig: Rig | None) -> Row:
    problem, objective = simulated.problem, search.objective
    schedule = simulated.simulator.run(candidate.devices, candidate.priority)
    priority = np.empty(problem.op_count)
    order = run_order(problem, schedule.start_ns) if rig is None else rig.order(problem, schedule)
    priority[order] = np.arange(problem.op_count, 0, -1)
    made_by = MadeBy(
        placer=candidate.title,
        seed=search.seed,
        budget=str(search.budget),
        version=placer.__version__,
    )
    placement = replace(
        Placement.of(problem.graph, problem.cluster, candidate.devices, priority, made_by),
        objective=objective.name,
        micro_batches=objective.micro_batches,
        in_flight=objective.in_flight,
    )
    prediction = objective.predict(simulated, placement)
    return Row(
        name=candidate.title,
        placement=placement,
        predicted_s=prediction.value_s,
        peak_memory_bytes=dict(prediction.peak_memory_bytes),
        why=prediction.why,
        missing_bytes=prediction.missing_bytes,
        bound_s=_seconds(candidate.bound_ns),
        times_s=prediction.times_s,
    )


def _seconds(bound_ns: int | None) -> float | None:
    if bound_ns is None:
        return None
    return bound_ns / 1e9 if bound_ns < INFEASIBLE_NS else np.inf
