"""The search of an optimization: candidates, with predictions of how they will be run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulated
from envs.simulator.fitting import grouped_problem
from envs.simulator.schedule import issue_order, repeats
from graphs.coarsen.groups import Coarsened, coarsen
from placer.interrupt import Interrupt
from placer.job import SearchConfig
from placer.progress import Progress
from placer.ray_cluster.connection import RayCluster
from placer.ray_cluster.islands import Islands
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.request import Budget, Placer, SearchRequest, SearchTrace
from placer.startup import VERSION

if TYPE_CHECKING:
    from envs.runtime import Runtime


def grouped(graph: nx.DiGraph[str], search: SearchConfig) -> Coarsened | None:
    """Return the ops merged into groups, None if the search asks for none."""
    return None if search.groups is None else coarsen(graph, most_groups=search.groups)


@contextmanager
def searching(config: SearchConfig) -> Iterator[Placer]:
    """Yield the search algorithm; on islands of a Ray cluster, if the search asks for one.

    The connection is made at once and held until the context ends, also for others inside.
    """
    if config.ray_address is None:
        yield config.placer
        return
    with RayCluster(config.ray_address) as cluster:
        yield Islands(config.placer, cluster)


@dataclass(slots=True, kw_only=True)
class CandidateSearch:
    """Searches placements, and predicts each as the placement that gives its simulated order."""

    config: SearchConfig
    placer: Placer  # of the config, or its islands
    interrupt: Interrupt
    progress: Progress
    coarse: Coarsened | None = None  # groups of ops to place; None: single ops
    warm_start: Placement | None = None
    runtime: Runtime | None = None  # of devices that are all on this machine
    duration_s: float = 0.0  # of all searches so far

    def candidates(
        self, problem: Problem, search_trace: SearchTrace, budget: Budget
    ) -> list[Candidate]:
        """Return the predicted candidates of a search, none where ops cannot be placed."""
        if not self.places:
            return []
        began = time.perf_counter()
        config, searched, start = self.config, problem, None
        if self.warm_start is not None:
            start = Evaluator(problem).candidate(Kind.WARM_START, *self.warm_start.arrays())
        if self.coarse is not None:
            searched = grouped_problem(self.coarse, problem)
        is_searched = self.warm_start is not None and not self.warm_start.unplaced
        request = SearchRequest(
            searched,
            budget,
            seed=config.seed,
            progress=self.progress.advance,
            should_stop=self.interrupt.asked,
            search_trace=search_trace,
            workers=config.worker_count,
            start=start if is_searched and self.coarse is None else None,
        )
        with self.interrupt.polled():
            found = config.objective.search(request, self.placer)
            candidates = [each for each in found if each.kind is not Kind.WARM_START]
            if self.coarse is not None:
                candidates = [_expanded(candidate, self.coarse) for candidate in candidates]
                candidates += _by_op(problem)  # groups may exclude good placements
            if start is not None:
                candidates.append(start)
            simulated = Simulated(problem)
            predicted = [self._predicted(candidate, simulated) for candidate in candidates]
        self.duration_s += time.perf_counter() - began
        return predicted

    @property
    def places(self) -> bool:
        """Return whether what runs the candidates, if anything does, can run placements."""
        return self.runtime is None or self.runtime.places or self.config.backend is not None

    def unplaced(self, problems: Sequence[Problem]) -> list[Candidate]:
        """Return the unplaced model of each problem on the first device that it fits on, CPU last.

        All but the first are named by their device.
        """
        found: list[Candidate] = []
        for problem in problems:
            order = -np.arange(problem.op_count, dtype=np.float64)
            evaluator, names = Evaluator(problem), problem.cluster.names
            candidates = [
                evaluator.candidate(
                    Kind.UNPLACED,
                    np.full(len(order), d, np.int32),
                    order,
                    name=f"{Kind.UNPLACED.value} {names[d]}" if found else "",
                )
                for d in sorted(range(len(names)), key=lambda d: names[d] == "cpu")
            ]
            fitting = (each for each in candidates if each.step_ns < INFEASIBLE_NS)
            found.append(self._predicted(next(fitting, candidates[0]), Simulated(problem)))
        return found

    def predicted_again(self, candidate: Candidate, problem: Problem) -> Candidate:
        """Return a candidate of an earlier search with its prediction by other costs."""
        prediction = self.config.objective.predict(Simulated(problem), candidate.placement)
        prediction = replace(prediction, peak_memory_bytes=candidate.peak_memory_bytes)
        return replace(candidate, prediction=prediction, bound_ns=None)

    def _predicted(self, candidate: Candidate, simulated: Simulated) -> Candidate:
        """Return a candidate with its prediction, as a placement that gives the simulated order.

        Where nothing runs it, it keeps its own priorities if that order is slower: links may serve
        transfers by priority, and micro-batches have an order of their own.
        """
        problem, objective = simulated.problem, self.config.objective
        schedule = simulated.simulator.run(candidate.devices, candidate.priority, transfers=False)
        if self.runtime is None:
            order = issue_order(problem, schedule)
        else:
            order = self.runtime.order(problem, schedule)
        priority = np.empty(problem.op_count)
        priority[order] = np.arange(problem.op_count, 0, -1)
        made_by = MadeBy(
            placer=candidate.name,
            seed=self.config.seed,
            budget=str(self.config.budget),
            version=VERSION,
        )
        placement = replace(
            Placement.of(problem.graph, problem.cluster, candidate.devices, priority, made_by),
            objective=objective.name,
            micro_batches=objective.micro_batches,
            in_flight=objective.in_flight,
            unplaced=candidate.is_unplaced,
        )
        is_known = objective.micro_batches == 1 and repeats(problem, schedule, priority)
        prediction = objective.predict(simulated, placement, schedule if is_known else None)
        if self.runtime is None and not is_known:
            own_order = replace(placement, priority=tuple(candidate.priority.tolist()))
            own = objective.predict(simulated, own_order)
            prediction = min(prediction, own, key=lambda each: each.objective_s)
        if self.runtime is not None and np.isfinite(prediction.objective_s):
            peaks = self.runtime.peak_memory_bytes(placement, order) or prediction.peak_memory_bytes
            prediction = replace(prediction, peak_memory_bytes=peaks)
        return replace(candidate, prediction=prediction)


def _by_op(problem: Problem) -> list[Candidate]:
    candidates = heuristics(Evaluator(problem))
    schedulers = [each for each in candidates if each.kind in (Kind.HEFT, Kind.ETF)]
    return [replace(each, name=f"{each.name} by op") for each in schedulers]


def _expanded(candidate: Candidate, coarse: Coarsened) -> Candidate:
    """Return a candidate for groups as one for their ops; its bound does not carry over."""
    devices, priority = coarse.expand(candidate.devices, candidate.priority)
    return replace(candidate, devices=devices, priority=priority, bound_ns=None)
