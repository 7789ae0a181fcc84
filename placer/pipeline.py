"""The optimization pipeline: extract, measure costs, search, run the best candidates, choose."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from graphs.extract import AUTO
from graphs.graph import GraphArrays
from placer.demands import demanded
from placer.given import GIVEN, Given, placement_of
from placer.interrupt import Interrupt
from placer.objectives import Objective
from placer.outcome import Optimization, PlacementError, Row, choose
from placer.placers.placer import Placer
from placer.placers.portfolio import Portfolio
from placer.record import with_record
from placer.report.progress import Progress, Silent
from placer.running import Runs, joined, overfull, run_best, with_less_memory
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.compiling import compiled_beside, load_compiled_code
from placer.search.heuristics import ETF_NAME, HEFT_NAME, heuristics
from placer.search.judge import Judge
from placer.search.portfolio import Proposer
from placer.search.trail import Trail, recorded

if TYPE_CHECKING:
    from envs.runtime import Runtime
    from graphs.extract import Extraction, Step

SMALLER: Final = (0.85, 0.7)
"""Shares of device memory to search with, in turn, if candidates run out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an optimization."""

    budget: Budget = field(default_factory=lambda: Budget(seconds=20.0))
    seed: int = 0
    policy: Proposer | None = None  # None: search without a policy
    placer: Placer | None = None  # None: Portfolio(policy)
    measure: bool = True
    objective: Objective = field(default_factory=Objective)
    keep_together: Sequence[str] = ()  # patterns: ops that match one share a device
    pins: Mapping[str, str] = field(default_factory=dict)  # {pattern: device name}
    fresh: bool = False  # measure devices and ops again and ignore the cache
    extractor: str = AUTO  # how the graph is extracted
    overlap: bool = False  # run with copies that overlap compute
    groups: int | None = None  # place at most this many groups of ops; None: single ops
    start_from: Given | None = None  # warm start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outset:
    """Inputs of a search besides its problem."""

    coarse: Coarsened | None  # groups of ops to place; None: single ops
    given: Placement | None  # warm start


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedStep:
    """An extracted step with op costs, ready for a search."""

    extraction: Extraction
    rig: Runtime
    graph: nx.DiGraph[str]  # with costs and user constraints
    cluster: Cluster  # calibrated, with the memory that placements may use
    given: Placement | None


def optimize_step(
    step: Step, cluster: Cluster, options: Options, progress: Progress | None = None
) -> Optimization:
    """Place one step of a model.

    If all devices are on this machine, the best candidates are run; otherwise the simulated step
    time decides.

    Args:
        step: the model and its example inputs.
        cluster: devices. If all are on this machine and there are no links, device and link speeds
            are calibrated. Devices elsewhere need rates, see envs/costs/roofline.py.
        options: search budget, seed, constraints and the like.
        progress: receives progress.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device.
        DemandError: an option names ops or devices that do not exist, or contradicts another.
        ValueError: a device is neither on this machine nor described, cores are mixed with torch
            devices, the warm start belongs to another model or cluster, or copies cannot overlap.
        PlacementError: no placement that fits was found, or nothing could be run.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    all_here = all(map(is_here, cluster.names))
    with Interrupt() as interrupt:
        known = costed_step(step, cluster, options, hear)
        problem = Problem.of(GraphArrays.from_graph(known.graph), known.cluster)
        runs = all_here and known.rig.runs
        found = _decided(
            problem,
            options,
            interrupt,
            hear,
            known.extraction,
            known.rig if runs else None,
            outset=_Outset(coarse=grouped(known.graph, options), given=known.given),
        )
        return replace(found, cost_source=known.graph.graph["cost_source"])


def costed_step(step: Step, cluster: Cluster, options: Options, hear: Progress) -> CostedStep:
    """Extract a step and measure or look up its op costs.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device.
        DemandError: an option names ops or devices that do not exist, or contradicts another.
        ValueError: as for :func:`optimize_step`.
    """
    from envs.costs.roofline import check_cluster
    from envs.runtime import calibrated, runtime_for
    from graphs.extract import extract
    from graphs.extract.fake import check_has_memory

    check_cluster(cluster)
    if any(map(is_here, cluster.names)):
        check_has_memory(step)
    hear.stage("Extracting the graph")
    with compiled_beside() as compiles:
        extraction = extract(step, options.extractor)
        rig = runtime_for(extraction, cluster, overlap=options.overlap)
        graph = demanded(rig.graph, cluster, options.keep_together, options.pins)
        given = _given(options, extraction, graph, cluster)
        if compiles:  # before anything is timed
            hear.stage(loading_stage())
            load_compiled_code()
    if all(map(is_here, cluster.names)) and not cluster.links:
        hear.stage("Calibrating devices")
        cluster = calibrated(cluster, again=options.fresh)
    hear.stage("Measuring op costs")
    return CostedStep(
        extraction=extraction,
        rig=rig,
        graph=rig.costed(
            graph,
            cluster,
            fresh=options.fresh,
            progress=lambda done, total: hear.advance(done / total),
        ),
        cluster=rig.planned(cluster),
        given=given,
    )


def optimize_graph(
    graph: nx.DiGraph[str], cluster: Cluster, options: Options, progress: Progress | None = None
) -> Optimization:
    """Place a graph with known costs; nothing is run, the simulated step time decides.

    Raises:
        DemandError: an option names ops or devices that do not exist, or contradicts another.
        ValueError: an op has no cost on any device of the cluster, or the warm start is no
            placement of the graph.
        PlacementError: no placement that fits was found.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    with Interrupt() as interrupt:
        graph = demanded(graph, cluster, options.keep_together, options.pins)
        problem = Problem.of(GraphArrays.from_graph(graph), cluster)
        given = _given(options, None, graph, cluster)
        outset = _Outset(coarse=grouped(graph, options), given=given)
        found = _decided(problem, options, interrupt, hear, outset=outset)
        return replace(found, cost_source=graph.graph["cost_source"])


def optimize_problem(
    problem: Problem,
    options: Options,
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
        outset = _Outset(coarse=coarse, given=None)
        return _decided(problem, options, interrupt, progress or Silent(), outset=outset)


def _given(
    options: Options, extraction: Extraction | None, graph: nx.DiGraph[str], cluster: Cluster
) -> Placement | None:
    if options.start_from is None:
        return None
    return placement_of(options.start_from, extraction, GraphArrays.from_graph(graph), cluster)


def _decided(
    problem: Problem,
    options: Options,
    interrupt: Interrupt,
    hear: Progress,
    extraction: Extraction | None = None,
    rig: Runtime | None = None,
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
            rows = _searched(problem, options, interrupt, hear, rig, outset)
            ended = ran = time.perf_counter()
            bounds_s = [row.bound_s for row in rows if row.bound_s is not None]
        if rig is not None and options.measure and not interrupt.requested:
            hear.stage("Running the best for real")
            runs = run_best(rows, rig, problem, hear)
            for share in SMALLER:
                if runs.interrupted or not overfull(rows, runs):
                    break
                hear.stage(f"Memory did not suffice: searching again for {share:.0%} of it")
                smaller = with_less_memory(problem, share)
                with interrupt.polled(), recorded() as again:
                    more = _searched(smaller, options, interrupt, hear, rig, outset)
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
    if rig is not None and options.measure:
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
                lower_bound_s=max(options.objective.lower_bound_s(problem), *bounds_s, 0.0),
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


def grouped(graph: nx.DiGraph[str], options: Options) -> Coarsened | None:
    """Return the ops merged into groups, None if the options ask for none."""
    return None if options.groups is None else coarsen(graph, most_groups=options.groups)


def _searched(
    problem: Problem,
    options: Options,
    interrupt: Interrupt,
    hear: Progress,
    rig: Runtime | None,
    outset: _Outset,
) -> list[Row]:
    searched = problem
    if outset.coarse is not None:
        searched = Problem.of(GraphArrays.from_graph(outset.coarse.graph), problem.cluster)
    candidates = options.objective.search(
        searched,
        options.budget,
        options.seed,
        options.placer or Portfolio(options.policy),
        progress=hear.advance,
        should_stop=interrupt.asked,
    )
    if outset.coarse is not None:
        candidates = [_expanded(plan, outset.coarse) for plan in candidates]
        candidates += _by_op(problem)  # groups may exclude good placements
    if outset.given is not None:
        candidates.append(Judge(problem).candidate(GIVEN, *outset.given.arrays()))
    simulated = Simulated(problem)
    return [_row(simulated, candidate, options, rig) for candidate in candidates]


def _by_op(problem: Problem) -> list[Candidate]:
    found = heuristics(Judge(problem))
    schedulers = [plan for plan in found if plan.name in (HEFT_NAME, ETF_NAME)]
    return [replace(plan, name=f"{plan.name} by op") for plan in schedulers]


def _expanded(plan: Candidate, coarse: Coarsened) -> Candidate:
    """Return a candidate for groups as one for their ops; its bound does not carry over."""
    devices, priority = coarse.expand(plan.devices, plan.priority)
    return replace(plan, devices=devices, priority=priority, bound_ns=None)


def _row(simulated: Simulated, candidate: Candidate, options: Options, rig: Runtime | None) -> Row:
    problem, objective = simulated.problem, options.objective
    schedule = simulated.simulator.run(candidate.devices, candidate.priority)
    priority = np.empty(problem.op_count)
    order = run_order(problem, schedule.start_ns) if rig is None else rig.order(problem, schedule)
    priority[order] = np.arange(problem.op_count, 0, -1)
    made_by = MadeBy(
        placer=candidate.title,
        seed=options.seed,
        budget=str(options.budget),
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
