"""One optimization: its stages from the costs of a step to the result.

From the search on no result is lost: Ctrl-C only ends the current stage, and if the workers cannot
be started, the prediction decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.backend import Backend
from envs.costs.factors import fitted_source
from envs.executors.cores.errors import WorkerError
from envs.hardware.cluster import Cluster
from envs.measured import DevicesLostError
from envs.problem import Problem
from envs.simulator.bounds import missing_link
from envs.simulator.fitting import scaled_problem
from envs.simulator.reasons import memory_shortfall
from graphs.coarsen.groups import Coarsened
from placer.choose import PlacementError, choose, overfull, worth_running_too
from placer.costed_step import costed_step, unplaced_problems
from placer.interrupt import Interrupt
from placer.job import Job, SearchConfig
from placer.pipeline.calibration import Calibration, calibration_of
from placer.pipeline.candidate_runs import CandidateRuns
from placer.pipeline.candidate_search import CandidateSearch, grouped, searching
from placer.pipeline.node_runs import MOST_ON_NODES, NodeRuns, measuring_nodes
from placer.progress import Progress, Silent
from placer.ray_cluster.islands import Islands
from placer.result import Result
from placer.search.candidate import Candidate
from placer.search.compilation import load_compiled_code_in_a_stage
from placer.search.request import SearchTrace

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
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        placer = stack.enter_context(searching(job.search))
        nodes = stack.enter_context(measuring_nodes(job, progress))
        if nodes is not None and isinstance(placer, Islands):
            placer = replace(placer, others=MOST_ON_NODES[0])
        step = costed_step(job, progress)
        search = CandidateSearch(
            config=job.search,
            placer=placer,
            interrupt=interrupt,
            progress=progress,
            coarse=grouped(step.graph, job.search),
            warm_start=step.warm_start,
            runtime=step.runtime if step.can_run else None,
        )
        return _Optimization(
            problem=step.problem,
            search=search,
            unplaced=unplaced_problems(step, job, progress),
            extraction=step.extraction,
            cost_source=step.graph.graph["cost_source"],
            nodes=None if nodes is None else NodeRuns.of(job, nodes, progress),
        ).run()


def optimize_problem(
    problem: Problem,
    search: SearchConfig,
    progress: Progress | None = None,
    *,
    coarse: Coarsened | None = None,
) -> Result:
    """Place the ops of a problem, or groups of them; nothing is run."""
    with Interrupt() as interrupt, searching(search) as placer:
        of_problem = CandidateSearch(
            config=search,
            placer=placer,
            interrupt=interrupt,
            progress=progress or Silent(),
            coarse=coarse,
        )
        return _Optimization(problem=problem, search=of_problem).run()


@dataclass(slots=True, kw_only=True)
class _Optimization:
    """One optimization: its inputs, then its results so far."""

    problem: Problem
    search: CandidateSearch
    unplaced: list[Problem] = field(default_factory=list)  # of the same step, left unplaced
    nodes: NodeRuns | None = None
    extraction: Extraction | None = None
    cost_source: Mapping[str, str] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)  # proved by the search
    search_trace: SearchTrace = field(default_factory=SearchTrace)
    mispredicted: Candidate | None = None
    unconfirmed: bool = False
    trouble: str = ""

    def run(self) -> Result:
        """Search, run the best candidates where something can run them, and choose."""
        if reason := memory_shortfall(self.problem):
            raise PlacementError(f"The model fits nowhere: {reason}.")
        if reason := missing_link(self.problem):
            raise PlacementError(f"The model runs nowhere: {reason}.")
        progress, interrupt, backend = self.search.progress, self.search.interrupt, self._backend
        load_compiled_code_in_a_stage(progress)
        began = time.perf_counter()
        try:
            progress.stage("Searching placements")
            config = self.search.config
            budget = config.search_budget.part(1.0 - REPEATED) if backend else config.budget
            found = self.search.candidates(self.problem, self.search_trace, budget)
            self.candidates = found + self.search.unplaced(self.unplaced)
            self.bounds_s = proved_bounds_s(self.candidates)
            if backend is not None and not interrupt.requested:
                self._measure(
                    CandidateRuns(
                        backend=backend,
                        interrupt=interrupt,
                        progress=progress,
                        seconds=config.measuring_s if backend is self.search.runtime else math.inf,
                        nodes=self.nodes,
                    )
                )
        except KeyboardInterrupt:
            interrupt.requested = True
            if not self.candidates:
                raise
        except (WorkerError, DevicesLostError, OSError) as error:
            if not self.candidates:
                raise
            self.trouble = str(error)
        with interrupt.polled():
            return self._result(time.perf_counter() - began - self.search.duration_s)

    @property
    def _backend(self) -> Runtime | Backend | None:
        """Return the backend of the best candidates; None if the prediction decides."""
        config = self.search.config
        if config.backend is not None:
            return config.backend
        return self.search.runtime if config.measure else None

    def _measure(self, runs: CandidateRuns) -> None:
        """Run the best candidates; fit costs to the runs, or try with less memory."""
        self.search.progress.stage("Running the best for real")
        self.candidates = runs.best(self.problem, self.candidates, self._lower_bound_s)
        if overfull(self.candidates):
            self._use_less_memory(runs)
        elif not self.search.interrupt.requested:
            self._calibrate(runs)
        self.candidates = runs.final(self.problem, self.candidates)
        self.unconfirmed = runs.unconfirmed
        if fit := calibration_of(self.candidates, self.problem, self.unplaced, is_last=True):
            self._use(fit)

    def _use_less_memory(self, runs: CandidateRuns) -> None:
        """Search again with less memory while the best candidates run out of it."""
        search = self.search
        for share in smaller_shares(self.candidates, self.problem.cluster):
            if search.interrupt.requested or not overfull(self.candidates):
                return
            search.progress.stage(f"Memory did not suffice: searching again for {share:.0%} of it")
            smaller, search_trace = _with_less_memory(self.problem, share), SearchTrace()
            found = search.candidates(smaller, search_trace, search.config.search_budget)
            candidates = found + search.unplaced(self.unplaced)
            if not any(np.isfinite(each.predicted_s) for each in found):
                return
            # Runs are only compared with runs of the same rounds.
            failed = [each for each in self.candidates if each.failure]
            self.candidates = [*runs.best(smaller, candidates), *failed]
            self.search_trace = search_trace

    def _calibrate(self, runs: CandidateRuns) -> None:
        """Where predictions were off, search again with costs fitted to the runs."""
        search = self.search
        fit = calibration_of(self.candidates, self.problem, self.unplaced)
        if fit is None or fit.mispredicted is None:
            return
        self._use(fit)
        if not runs.has_time_for_further(self.candidates):
            return
        search.progress.stage("Predictions were off: searching again with fitted costs")
        budget = search.config.search_budget.part(REPEATED)
        found = search.candidates(self.problem, search_trace := SearchTrace(), budget)
        self.bounds_s = proved_bounds_s(found)
        further = worth_running_too(found, self.candidates)
        if further and not search.interrupt.requested:
            search.progress.stage("Running the best of them for real")
            self.candidates = runs.further(self.problem, self.candidates, further)
            self.search_trace = search_trace

    def _use(self, fit: Calibration) -> None:
        """Keep fitted costs; where predictions were off, predict with them from now on."""
        if self.search.runtime is not None and self.search.config.backend is None:
            fit.keep(self.search.runtime, self.problem, self.unplaced)
        if fit.mispredicted is None:
            return
        self.mispredicted = self.mispredicted or fit.mispredicted
        self.problem = scaled_problem(self.problem, fit.factors)
        self.unplaced = [
            scaled_problem(each, factors)
            for each, factors in zip(self.unplaced, fit.unplaced_factors, strict=True)
        ]
        self.candidates = [
            self.search.predicted_again(each, self._problem_of(each)) for each in self.candidates
        ]
        self.bounds_s = []  # proved with other costs

    @property
    def _lower_bound_s(self) -> float:
        """Return the lower bound of the objective over all placements."""
        bound_s = self.search.config.objective.lower_bound_s(self.problem)
        hand_over_s = self.problem.graph.hand_over_s  # what searches prove is without it
        return max(bound_s, *(each + hand_over_s for each in self.bounds_s), 0.0)

    def _problem_of(self, candidate: Candidate) -> Problem:
        problems = self.unplaced if candidate.is_unplaced else []
        names = candidate.placement.device_names
        return next((each for each in problems if each.cluster.names == names), self.problem)

    def _result(self, measuring_s: float) -> Result:
        self.candidates = [each for each in self.candidates if not each.spare]
        best, search = choose(self.candidates), self.search
        return Result(
            placement=best.placement,
            problem=self._problem_of(best),
            candidates=tuple(self.candidates),
            best=best,
            lower_bound_s=self._lower_bound_s,
            search_s=search.duration_s,
            measuring_s=0.0 if self._backend is None else measuring_s,
            stopped=search.interrupt.requested,
            extraction=self.extraction,
            cost_source=self.cost_source
            if self.mispredicted is None
            else {kind: fitted_source(text) for kind, text in self.cost_source.items()},
            mispredicted=self.mispredicted,
            unconfirmed=self.unconfirmed,
            limits={} if search.runtime is None else search.runtime.limits,
            search_trace=self.search_trace,
            trouble=self.trouble,
        ).with_times()


def smaller_shares(candidates: Sequence[Candidate], cluster: Cluster) -> list[float]:
    """Return shares of device memory to search with where candidates ran out of it.

    They begin with ``SMALLER[0]``, or with what gaps between tensors left in the runs if that is
    less: the simulator knows no gaps.
    """
    memory_bytes = {device.name: device.memory_bytes for device in cluster.devices}
    gaps = [
        (size - run.peak_memory_bytes.get(name, 0)) / memory_bytes[name]
        for each in candidates
        if (run := each.measurement) is not None and run.overfull
        for name, size in run.reserved_memory_bytes.items()
        if name in memory_bytes
    ]
    first = min([SMALLER[0], *(1 - gap for gap in gaps if gap < 1)])
    return [first * (share / SMALLER[0]) for share in SMALLER]


def _with_less_memory(problem: Problem, share: float) -> Problem:
    own = problem.cluster.devices
    devices = tuple(replace(each, memory_bytes=int(each.memory_bytes * share)) for each in own)
    return Problem.of(problem.graph, replace(problem.cluster, devices=devices))


def proved_bounds_s(candidates: Sequence[Candidate]) -> list[float]:
    """Return what the search proved; a proof that no placement fits bounds no step."""
    bounds_s = [each.bound_s for each in candidates if each.bound_s is not None]
    return [bound_s for bound_s in bounds_s if math.isfinite(bound_s)]
