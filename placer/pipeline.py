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
from envs.simulator import Simulated
from envs.simulator.schedule import repeats, run_order
from graphs.coarsen import Coarsened, coarsen
from graphs.extract import AUTO
from graphs.graph import GraphArrays
from placer.choose import PlacementError, choose
from placer.demands import demanded
from placer.given import Given, placement_of
from placer.interrupt import Interrupt
from placer.objectives import Objective
from placer.placers.placer import Placer
from placer.placers.portfolio import Portfolio
from placer.report.progress import Progress, Silent
from placer.result import Result
from placer.running import Runs, overfull, run_best, with_less_memory
from placer.search.budget import Budget
from placer.search.candidate import Candidate, Kind
from placer.search.compiling import compiled_beside, load_compiled_code
from placer.search.heuristics import heuristics
from placer.search.judge import Judge
from placer.search.portfolio import Proposer
from placer.search.request import SearchRequest
from placer.search.trail import Trail

if TYPE_CHECKING:
    from graphs.extract import Extraction, Step
    from placer.rigs import Rig

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
class CostedStep:
    """An extracted step with op costs, ready for a search."""

    extraction: Extraction
    rig: Rig
    graph: nx.DiGraph[str]  # with costs and user constraints
    cluster: Cluster  # calibrated, with the memory that placements may use
    warm_start: Placement | None


def optimize_step(
    step: Step, cluster: Cluster, options: Options, progress: Progress | None = None
) -> Result:
    """Place one step of a model.

    If all devices are on this machine, the best candidates are run; otherwise the simulated step
    time decides.

    Args:
        step: the model and its example inputs.
        cluster: devices. If all are on this machine and there are no links, device and link speeds
            are calibrated. Devices elsewhere need rates, see envs/roofline.py.
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
        return _Optimization(
            problem=problem,
            options=options,
            interrupt=interrupt,
            progress=hear,
            coarse=grouped(known.graph, options),
            warm_start=known.warm_start,
            extraction=known.extraction,
            rig=known.rig if all_here and known.rig.runs else None,
            cost_source=known.graph.graph["cost_source"],
        ).run()


def costed_step(step: Step, cluster: Cluster, options: Options, hear: Progress) -> CostedStep:
    """Extract a step and measure or look up its op costs.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device.
        DemandError: an option names ops or devices that do not exist, or contradicts another.
        ValueError: as for :func:`optimize_step`.
    """
    from envs.calibrate import calibrated
    from envs.op_costs import check_cluster
    from graphs.extract import extract
    from graphs.extract.fake import check_has_memory
    from placer.rigs import rig_for

    check_cluster(cluster)
    if any(map(is_here, cluster.names)):
        check_has_memory(step)
    hear.stage("Extracting the graph")
    with compiled_beside() as compiles:
        extraction = extract(step, options.extractor)
        rig = rig_for(extraction, cluster, overlap=options.overlap)
        graph = demanded(rig.graph, cluster, options.keep_together, options.pins)
        warm_start = _warm_start(options, extraction, graph, cluster)
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
        graph=rig.costed(graph, cluster, hear, fresh=options.fresh),
        cluster=rig.planned(cluster),
        warm_start=warm_start,
    )


def optimize_graph(
    graph: nx.DiGraph[str], cluster: Cluster, options: Options, progress: Progress | None = None
) -> Result:
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
        return _Optimization(
            problem=problem,
            options=options,
            interrupt=interrupt,
            progress=hear,
            coarse=grouped(graph, options),
            warm_start=_warm_start(options, None, graph, cluster),
            cost_source=graph.graph["cost_source"],
        ).run()


def optimize_problem(
    problem: Problem,
    options: Options,
    progress: Progress | None = None,
    *,
    coarse: Coarsened | None = None,
) -> Result:
    """Place the ops of a problem, or the given groups of them; nothing is run.

    Raises:
        PlacementError: no placement that fits was found.
        KeyboardInterrupt: stopped before there was any placement.
    """
    with Interrupt() as interrupt:
        return _Optimization(
            problem=problem,
            options=options,
            interrupt=interrupt,
            progress=progress or Silent(),
            coarse=coarse,
        ).run()


def grouped(graph: nx.DiGraph[str], options: Options) -> Coarsened | None:
    """Return the ops merged into groups, None if the options ask for none."""
    return None if options.groups is None else coarsen(graph, most_groups=options.groups)


def _warm_start(
    options: Options, extraction: Extraction | None, graph: nx.DiGraph[str], cluster: Cluster
) -> Placement | None:
    if options.start_from is None:
        return None
    return placement_of(options.start_from, extraction, GraphArrays.from_graph(graph), cluster)


@dataclass(slots=True, kw_only=True)
class _Optimization:
    """One optimization: its inputs, then what its steps have found so far."""

    problem: Problem
    options: Options
    interrupt: Interrupt
    progress: Progress
    coarse: Coarsened | None = None  # groups of ops to place; None: single ops
    warm_start: Placement | None = None
    extraction: Extraction | None = None
    rig: Rig | None = None  # runs the best candidates; None: the prediction decides
    cost_source: Mapping[str, str] = field(default_factory=dict)
    runs: Runs = field(default_factory=lambda: Runs(candidates=[]))
    bounds_s: list[float] = field(default_factory=list)  # proved by the search
    trail: Trail = field(default_factory=Trail)
    trouble: str = ""
    search_s: float = 0.0

    def run(self) -> Result:
        """Search, run the best candidates if there is a runtime, and choose.

        From the search on no result is lost: Ctrl-C only ends the current stage, and if the workers
        cannot be started, the prediction decides.
        """
        if why := why_too_large(self.problem):
            raise PlacementError(f"The model fits nowhere: {why}.")
        if why := why_apart(self.problem):
            raise PlacementError(f"The model runs nowhere: {why}.")
        self.progress.stage(loading_stage())
        load_compiled_code()
        began = time.perf_counter()
        try:
            self._search()
            self.search_s = time.perf_counter() - began
            self._measure()
        except KeyboardInterrupt:
            self.interrupt.requested = True
            if not self.runs.candidates:
                raise
        except (WorkerError, OSError) as error:
            if not self.runs.candidates:
                raise
            self.trouble = str(error)
        with self.interrupt.polled():
            return self._result(time.perf_counter() - began - self.search_s)

    def _search(self) -> None:
        self.progress.stage("Searching placements")
        with self.interrupt.polled():
            found = self._candidates(self.problem, self.trail)
            self.runs = Runs(candidates=found)
            self.bounds_s = [own.bound_s for own in found if own.bound_s is not None]

    def _measure(self) -> None:
        """Run the best candidates; while they run out of memory, search again with less of it."""
        rig = self.rig
        if rig is None or not self.options.measure or self.interrupt.requested:
            return
        self.progress.stage("Running the best for real")
        self.runs = run_best(self.runs.candidates, rig, self.problem, self.progress)
        for share in SMALLER:
            if self.runs.interrupted or not overfull(self.runs.candidates):
                return
            self.progress.stage(f"Memory did not suffice: searching again for {share:.0%} of it")
            smaller, trail = with_less_memory(self.problem, share), Trail()
            with self.interrupt.polled():
                found = self._candidates(smaller, trail)
            if not any(np.isfinite(own.predicted_s) for own in found):
                return
            runs = run_best(found, rig, smaller, self.progress)
            # Runs are only compared with runs of the same rounds.
            failed = [own for own in self.runs.candidates if own.failure]
            self.runs = replace(runs, candidates=[*runs.candidates, *failed])
            self.trail = trail

    def _result(self, measuring_s: float) -> Result:
        best = choose(self.runs.candidates)
        bound_s = self.options.objective.lower_bound_s(self.problem)
        return Result(
            placement=best.placement,
            problem=self.problem,
            candidates=tuple(self.runs.candidates),
            best=best,
            lower_bound_s=max(bound_s, *self.bounds_s, 0.0),
            search_s=self.search_s,
            measuring_s=measuring_s if self.rig is not None and self.options.measure else 0.0,
            stopped=self.interrupt.requested or self.runs.interrupted,
            extraction=self.extraction,
            all_cores=self.runs.all_cores,
            cost_source=self.cost_source,
            trail=self.trail,
            trouble=self.trouble,
        ).with_times()

    def _candidates(self, problem: Problem, trail: Trail) -> list[Candidate]:
        """Return the predicted candidates of a search."""
        options, searched = self.options, problem
        if self.coarse is not None:
            searched = Problem.of(GraphArrays.from_graph(self.coarse.graph), problem.cluster)
        request = SearchRequest(
            searched,
            options.budget,
            seed=options.seed,
            progress=self.progress.advance,
            should_stop=self.interrupt.asked,
            trail=trail,
        )
        found = options.objective.search(request, options.placer or Portfolio(options.policy))
        if self.coarse is not None:
            found = [_expanded(candidate, self.coarse) for candidate in found]
            found += _by_op(problem)  # groups may exclude good placements
        if self.warm_start is not None:
            found.append(Judge(problem).candidate(Kind.WARM_START, *self.warm_start.arrays()))
        simulated = Simulated(problem)
        return [self._predicted(candidate, simulated) for candidate in found]

    def _predicted(self, candidate: Candidate, simulated: Simulated) -> Candidate:
        """Return a candidate with its prediction, as a placement that gives the simulated order."""
        problem, objective = simulated.problem, self.options.objective
        schedule = simulated.simulator.run(candidate.devices, candidate.priority, transfers=False)
        if self.rig is None:
            order = run_order(problem, schedule.start_ns)
        else:
            order = self.rig.order(problem, schedule)
        priority = np.empty(problem.op_count)
        priority[order] = np.arange(problem.op_count, 0, -1)
        made_by = MadeBy(
            placer=candidate.name,
            seed=self.options.seed,
            budget=str(self.options.budget),
            version=placer.__version__,
        )
        placement = replace(
            Placement.of(problem.graph, problem.cluster, candidate.devices, priority, made_by),
            objective=objective.name,
            micro_batches=objective.micro_batches,
            in_flight=objective.in_flight,
        )
        is_known = objective.micro_batches == 1 and repeats(problem, schedule, priority)
        prediction = objective.predict(simulated, placement, schedule if is_known else None)
        return replace(candidate, prediction=prediction)


def _by_op(problem: Problem) -> list[Candidate]:
    found = heuristics(Judge(problem))
    schedulers = [own for own in found if own.kind in (Kind.HEFT, Kind.ETF)]
    return [replace(own, name=f"{own.name} by op") for own in schedulers]


def _expanded(candidate: Candidate, coarse: Coarsened) -> Candidate:
    """Return a candidate for groups as one for their ops; its bound does not carry over."""
    devices, priority = coarse.expand(candidate.devices, candidate.priority)
    return replace(candidate, devices=devices, priority=priority, bound_ns=None)
