"""The optimization pipeline: extract, measure costs, search, run the best candidates, choose."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import networkx as nx
import numpy as np

from envs.backend import Backend, measurements
from envs.compiled import loading_stage
from envs.costs.factors import fitted_source, unplaced_factors
from envs.executors.cores.errors import WorkerError
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import Simulated
from envs.simulator.bounds import missing_link
from envs.simulator.fitting import fitted_factors, grouped_problem, scaled_problem
from envs.simulator.reasons import memory_shortfall
from envs.simulator.schedule import issue_order, repeats
from graphs.coarsen.groups import Coarsened, coarsen
from placer.choose import (
    PlacementError,
    choose,
    mispredicted,
    overfull,
    runs_contended,
    worth_running,
    worth_running_too,
)
from placer.evaluation import costed_step, unplaced_problem
from placer.interrupt import Interrupt
from placer.job import Job, SearchConfig
from placer.progress import Progress, Silent, counter
from placer.result import Result
from placer.search.candidate import Candidate, Kind
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.request import SearchRequest, SearchTrace
from placer.startup import VERSION

if TYPE_CHECKING:
    from envs.runtime import Runtime
    from graphs.extract import Extraction

SMALLER: Final = (0.85, 0.7)
"""Shares of device memory to search with, in turn, if candidates run out of memory."""
REPEATED: Final = 1 / 3
"""Share of the search budget that is kept for a search with fitted costs, if candidates are run."""


def optimize_job(job: Job, progress: Progress | None = None) -> Result:
    """Place the step of a workload, or a graph with known costs.

    If all devices of a workload are on this machine, the best candidates are run; otherwise the
    simulated step time decides.
    """
    progress = progress or Silent()
    with Interrupt() as interrupt:
        step = costed_step(job, progress)
        return _Optimization(
            problem=step.problem,
            unplaced=unplaced_problem(step, job, progress),
            search=job.search,
            interrupt=interrupt,
            progress=progress,
            coarse=grouped(step.graph, job.search),
            warm_start=step.warm_start,
            extraction=step.extraction,
            runtime=step.runtime if step.can_run else None,
            cost_source=step.graph.graph["cost_source"],
        ).run()


def optimize_problem(
    problem: Problem,
    search: SearchConfig,
    progress: Progress | None = None,
    *,
    coarse: Coarsened | None = None,
) -> Result:
    """Place the ops of a problem, or groups of them; nothing is run."""
    with Interrupt() as interrupt:
        return _Optimization(
            problem=problem,
            search=search,
            interrupt=interrupt,
            progress=progress or Silent(),
            coarse=coarse,
        ).run()


def grouped(graph: nx.DiGraph[str], search: SearchConfig) -> Coarsened | None:
    """Return the ops merged into groups, None if the search asks for none."""
    return None if search.groups is None else coarsen(graph, most_groups=search.groups)


@dataclass(slots=True, kw_only=True)
class _Optimization:
    """One optimization: its inputs, then its results so far."""

    problem: Problem
    search: SearchConfig
    interrupt: Interrupt
    progress: Progress
    unplaced: Problem | None = None  # of the same step on the one device of the unplaced model
    coarse: Coarsened | None = None  # groups of ops to place; None: single ops
    warm_start: Placement | None = None
    extraction: Extraction | None = None
    runtime: Runtime | None = None  # of devices that are all on this machine
    cost_source: Mapping[str, str] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)  # proved by the search
    search_trace: SearchTrace = field(default_factory=SearchTrace)
    search_s: float = 0.0
    mispredicted: Candidate | None = None
    trouble: str = ""

    def run(self) -> Result:
        """Search, run the best candidates where something can run them, and choose.

        From the search on no result is lost: Ctrl-C only ends the current stage, and if the workers
        cannot be started, the prediction decides.
        """
        if reason := memory_shortfall(self.problem):
            raise PlacementError(f"The model fits nowhere: {reason}.")
        if reason := missing_link(self.problem):
            raise PlacementError(f"The model runs nowhere: {reason}.")
        self.progress.stage(loading_stage())
        load_compiled_code()
        began = time.perf_counter()
        try:
            self.progress.stage("Searching placements")
            share = 1.0 if self._backend is None else 1.0 - REPEATED
            found = self._searched(self.problem, self.search_trace, share)
            self.candidates = found + self._unplaced_candidates()
            self.bounds_s = _bounds_s(self.candidates)
            if self._backend is not None and not self.interrupt.requested:
                self._measure(self._backend)
        except KeyboardInterrupt:
            self.interrupt.requested = True
            if not self.candidates:
                raise
        except (WorkerError, OSError) as error:
            if not self.candidates:
                raise
            self.trouble = str(error)
        with self.interrupt.polled():
            return self._result(time.perf_counter() - began - self.search_s)

    @property
    def _backend(self) -> Runtime | Backend | None:
        """Return the backend of the best candidates; None if the prediction decides."""
        if self.search.backend is not None:
            return self.search.backend
        return self.runtime if self.search.measure else None

    def _measure(self, backend: Runtime | Backend) -> None:
        """Run the best candidates; fit costs to the runs, or try with less memory."""
        self.progress.stage("Running the best for real")
        self.candidates = self._run_best(backend, self.problem, self.candidates)
        if overfull(self.candidates):
            self._use_less_memory(backend)
        else:
            self._calibrate(backend)

    def _use_less_memory(self, backend: Runtime | Backend) -> None:
        """Search again with less memory while the best candidates run out of it."""
        for share in SMALLER:
            if self.interrupt.requested or not overfull(self.candidates):
                return
            self.progress.stage(f"Memory did not suffice: searching again for {share:.0%} of it")
            smaller, search_trace = _with_less_memory(self.problem, share), SearchTrace()
            candidates = self._searched(smaller, search_trace) + self._unplaced_candidates()
            if not worth_running(candidates, smaller.cluster):
                return
            # Runs are only compared with runs of the same rounds.
            failed = [each for each in self.candidates if each.failure]
            self.candidates = [*self._run_best(backend, smaller, candidates), *failed]
            self.search_trace = search_trace

    def _calibrate(self, backend: Runtime | Backend) -> None:
        """Fit op costs to the runs; where predictions were off, search again with fitted costs."""
        ran = [each for each in self.candidates if each.measurement and each.can_run]
        placed = [each for each in ran if not each.is_unplaced]
        if self.interrupt.requested or not placed or runs_contended(ran):
            return
        factors = fitted_factors(
            self.problem,
            [each.placement for each in placed],
            [each.ranking_s(contended=False) for each in placed],
        )
        unplaced = self._fitted_unplaced(ran)
        if self.search.backend is None and self.runtime is not None:
            self.runtime.keep_factors(self.problem.cluster, factors)
        wrong = mispredicted(ran)
        if wrong is None:
            return
        fitted = scaled_problem(self.problem, factors)
        self.progress.stage("Predictions were off: searching again with fitted costs")
        found = self._searched(fitted, search_trace := SearchTrace(), REPEATED)
        before = [
            self._predicted_again(each, unplaced if each.is_unplaced and unplaced else fitted)
            for each in self.candidates
        ]
        self.problem, self.unplaced, self.candidates = fitted, unplaced, before
        self.mispredicted, self.bounds_s = wrong, _bounds_s(found)
        further = worth_running_too(found, before)
        if further and not self.interrupt.requested:
            self.progress.stage("Running the best of them for real")
            self._run_further(backend, further)
            self.search_trace = search_trace

    def _run_further(self, backend: Runtime | Backend, further: Sequence[Candidate]) -> None:
        """Run the best of a second search beside the best of the first and the baselines.

        Runs are only compared with runs of the same rounds: if these do not end, the first count.
        """
        before = self.candidates
        ran = [each for each in before if each.measurement and each.can_run]
        several = [each for each in ran if not (each.is_single or each.is_unplaced)]
        best = choose(several or ran)
        always = (Kind.UNPLACED, Kind.WARM_START)
        kept = [each for each in ran if each is best or each.is_single or each.kind in always]
        both = [*(replace(each, name=f"{each.name}, fitted") for each in further), *kept]
        try:
            after = self._run(backend, self.problem, both, range(len(both)))
        except (WorkerError, OSError):
            return
        if not self.interrupt.requested:
            others = [each for each in before if each not in kept]
            others = [replace(each, measurement=None) if each in ran else each for each in others]
            self.candidates = sorted([*after, *others], key=lambda each: each.predicted_s)

    def _fitted_unplaced(self, ran: Sequence[Candidate]) -> Problem | None:
        """Fit the costs of the unplaced model to its step; return its problem with them."""
        unplaced = next((each for each in ran if each.is_unplaced), None)
        if self.unplaced is None or unplaced is None or self.runtime is None:
            return self.unplaced
        cluster = self.unplaced.cluster
        of_ops = unplaced_factors(unplaced.predicted_s, unplaced.ranking_s(contended=False))
        factors = {cluster.devices[0].kind: of_ops}
        self.runtime.keep_factors(cluster, factors)
        return scaled_problem(self.unplaced, factors)

    def _run_best(
        self, backend: Runtime | Backend, problem: Problem, candidates: Sequence[Candidate]
    ) -> list[Candidate]:
        """Run the best candidates and the best single devices in turn."""
        chosen = worth_running(candidates, problem.cluster)
        return self._run(backend, problem, candidates, chosen) if chosen else list(candidates)

    def _run(
        self,
        backend: Runtime | Backend,
        problem: Problem,
        candidates: Sequence[Candidate],
        chosen: Sequence[int],
    ) -> list[Candidate]:
        """Run the chosen ones of some candidates in turn."""
        placements = [candidates[i].placement for i in chosen]
        advance = counter(self.progress)
        if isinstance(backend, Backend):
            results = backend.evaluate(placements, advance)
            interrupted = getattr(backend, "interrupted", False)
        else:
            predicted_s = [candidates[i].predicted_s for i in chosen]
            with backend.backend(problem, predicted_s) as measured:
                results = measured.evaluate(placements, advance)
                interrupted = measured.interrupted
        self.interrupt.requested |= interrupted
        after = list(candidates)
        for i, measurement in zip(chosen, measurements(results), strict=True):
            if measurement.counts:
                after[i] = replace(candidates[i], measurement=measurement)
        return after

    def _result(self, measuring_s: float) -> Result:
        best = choose(self.candidates)
        bound_s = self.search.objective.lower_bound_s(self.problem)
        hand_over_s = self.problem.graph.hand_over_s  # what searches prove is without it
        return Result(
            placement=best.placement,
            problem=self.unplaced if best.is_unplaced and self.unplaced else self.problem,
            candidates=tuple(self.candidates),
            best=best,
            lower_bound_s=max(bound_s, *(each + hand_over_s for each in self.bounds_s), 0.0),
            search_s=self.search_s,
            measuring_s=0.0 if self._backend is None else measuring_s,
            stopped=self.interrupt.requested,
            extraction=self.extraction,
            cost_source=self.cost_source
            if self.mispredicted is None
            else {kind: fitted_source(text) for kind, text in self.cost_source.items()},
            mispredicted=self.mispredicted,
            search_trace=self.search_trace,
            trouble=self.trouble,
        ).with_times()

    def _searched(
        self, problem: Problem, search_trace: SearchTrace, share: float = 1.0
    ) -> list[Candidate]:
        """Return the predicted candidates of a search with a share of the budget."""
        began = time.perf_counter()
        search, searched = self.search, problem
        if self.coarse is not None:
            searched = grouped_problem(self.coarse, problem)
        request = SearchRequest(
            searched,
            search.budget.part(share),
            seed=search.seed,
            progress=self.progress.advance,
            should_stop=self.interrupt.asked,
            search_trace=search_trace,
        )
        with self.interrupt.polled():
            candidates = search.objective.search(request, search.placer)
            if self.coarse is not None:
                candidates = [_expanded(candidate, self.coarse) for candidate in candidates]
                candidates += _by_op(problem)  # groups may exclude good placements
            if self.warm_start is not None:
                candidates.append(
                    Evaluator(problem).candidate(Kind.WARM_START, *self.warm_start.arrays())
                )
            simulated = Simulated(problem)
            predicted = [self._predicted(candidate, simulated) for candidate in candidates]
        self.search_s += time.perf_counter() - began
        return predicted

    def _unplaced_candidates(self) -> list[Candidate]:
        """Return the unplaced model, if it can be run."""
        if self.unplaced is None:
            return []
        order = -np.arange(self.unplaced.op_count, dtype=np.float64)
        candidate = Evaluator(self.unplaced).candidate(
            Kind.UNPLACED, np.zeros(len(order), np.int32), order
        )
        return [self._predicted(candidate, Simulated(self.unplaced))]

    def _predicted(self, candidate: Candidate, simulated: Simulated) -> Candidate:
        """Return a candidate with its prediction, as a placement that gives the simulated order."""
        problem, objective = simulated.problem, self.search.objective
        schedule = simulated.simulator.run(candidate.devices, candidate.priority, transfers=False)
        if self.runtime is None:
            order = issue_order(problem, schedule)
        else:
            order = self.runtime.order(problem, schedule)
        priority = np.empty(problem.op_count)
        priority[order] = np.arange(problem.op_count, 0, -1)
        made_by = MadeBy(
            placer=candidate.name,
            seed=self.search.seed,
            budget=str(self.search.budget),
            version=VERSION,
        )
        placement = replace(
            Placement.of(problem.graph, problem.cluster, candidate.devices, priority, made_by),
            objective=objective.name,
            micro_batches=objective.micro_batches,
            in_flight=objective.in_flight,
        )
        is_known = objective.micro_batches == 1 and repeats(problem, schedule, priority)
        prediction = objective.predict(simulated, placement, schedule if is_known else None)
        if self.runtime is not None and np.isfinite(prediction.objective_s):
            peaks = self.runtime.peak_memory_bytes(placement, order) or prediction.peak_memory_bytes
            prediction = replace(prediction, peak_memory_bytes=peaks)
        return replace(candidate, prediction=prediction)

    def _predicted_again(self, candidate: Candidate, problem: Problem) -> Candidate:
        """Return a candidate of an earlier search with its prediction by other costs."""
        prediction = self.search.objective.predict(Simulated(problem), candidate.placement)
        prediction = replace(prediction, peak_memory_bytes=candidate.peak_memory_bytes)
        return replace(candidate, prediction=prediction, bound_ns=None)


def _with_less_memory(problem: Problem, share: float) -> Problem:
    own = problem.cluster.devices
    devices = tuple(replace(each, memory_bytes=int(each.memory_bytes * share)) for each in own)
    return Problem.of(problem.graph, replace(problem.cluster, devices=devices))


def _bounds_s(candidates: Sequence[Candidate]) -> list[float]:
    return [each.bound_s for each in candidates if each.bound_s is not None]


def _by_op(problem: Problem) -> list[Candidate]:
    candidates = heuristics(Evaluator(problem))
    schedulers = [each for each in candidates if each.kind in (Kind.HEFT, Kind.ETF)]
    return [replace(each, name=f"{each.name} by op") for each in schedulers]


def _expanded(candidate: Candidate, coarse: Coarsened) -> Candidate:
    """Return a candidate for groups as one for their ops; its bound does not carry over."""
    devices, priority = coarse.expand(candidate.devices, candidate.priority)
    return replace(candidate, devices=devices, priority=priority, bound_ns=None)
