"""Best placement of a small graph by constraint programming (CP-SAT of OR-tools).

The model follows the simulator: one device per op (one per co-location group), devices that run one
op at a time, one transfer of an output to each device that needs it, queues and ports that carry
one transfer at a time. Where it differs it is more permissive, so that its bound holds:

* a device or a queue may idle although something is ready, and a queue serves in any order; the
  simulator is work-conserving and takes transfers in order of request or priority;
* memory is that of parameters, gradients, optimizer state and held bytes, without activations.

Therefore the simulator evaluates every solution, with ops ordered by start time and by upward rank,
and its step time is reported. The solver's bound holds for every placement that the simulator can
run, in any order; a step time equal to the bound is optimal.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np
from ortools.sat.python import cp_model

from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Floats, Longs, Problem
from envs.simulator import INFEASIBLE_NS
from graphs.coarsen.merging import edge_sources
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.grouping import units
from placer.search.heuristics import heuristics
from placer.search.request import STEP_OBJECTIVES, Meter, SearchRequest
from placer.search.sampling import BudgetedEvaluator

LARGEST: Final = 80
"""Maximum number of ops; with more, proofs take hours and the heuristics' bounds are better."""
DETERMINISTIC_S: Final = 1e-3
"""Deterministic solver time for each evaluation of a budget, the same on every machine."""
LOOK_S: Final = 0.05
LONGEST_NS: Final = 1 << 52
"""Far above any simulated time, and small enough for the solver to add up."""
ROUNDS: Final = 4


class ExactPlacer:
    """CP-SAT from the best heuristic; its candidate holds the proven bound.

    An evaluation of a budget is worth a millisecond of the solver's deterministic time. Requires
    ortools.
    """

    objectives: ClassVar[tuple[str, ...]] = STEP_OBJECTIVES

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate; raise a ValueError if the graph has too many ops."""
        problem = request.problem
        if problem.op_count > LARGEST:
            raise ValueError(
                f"graph {problem.graph.name!r} has {problem.op_count} ops; exact search takes at "
                f"most {LARGEST}: merge them into {LARGEST} groups or take another placer"
            )
        budgeted = BudgetedEvaluator(request, Kind.EXACT)
        bound_ns = _solve(budgeted, request.seed, ranked(heuristics(budgeted.evaluator))[0])
        best = replace(budgeted.best(), bound_ns=bound_ns)
        proven = best.step_ns <= bound_ns < INFEASIBLE_NS
        request.report(1.0, "exact, proven to be the best" if proven else "exact, not proven")
        return [best]


def _solve(budgeted: BudgetedEvaluator, seed: int, start: Candidate) -> int:
    """Solve until the budget is spent; return a lower bound of all step times, in ns.

    The bound is 0 if nothing was proven, ``INFEASIBLE_NS`` if no placement is feasible.

    If the simulated step is longer than the solver's, the problem is solved again with another
    seed: solutions that are equal in the model differ in the simulator.
    """
    problem, bound_ns = budgeted.evaluator.problem, 0
    budgeted.evaluate(start.devices, start.priority)
    for number in range(ROUNDS):
        if budgeted.over():
            break
        model = _Model(problem)
        if number == 0:
            model.hint(start)  # a good bound at once; later rounds should find other solutions
        solver = _solver(budgeted.meter, seed + number)
        status = _status(solver, model, budgeted)
        if status == cp_model.INFEASIBLE:
            return INFEASIBLE_NS
        bound_ns = max(bound_ns, round(solver.best_objective_bound))
        budgeted.meter.spend(math.ceil(solver.response_proto.deterministic_time / DETERMINISTIC_S))
        if budgeted.best().step_ns <= bound_ns or status != cp_model.OPTIMAL:
            break
    return bound_ns


def _solver(meter: Meter, seed: int) -> cp_model.CpSolver:
    """Return a solver that stops when the budget is spent."""
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.catch_sigint_signal = False  # the next Ctrl-C would end the process without a word
    parameters.random_seed = seed & 0x7FFFFFFF
    left, seconds = meter.left(), meter.request.budget.seconds
    if left is not None:
        parameters.max_deterministic_time = DETERMINISTIC_S * left
    elif seconds is not None:
        parameters.max_time_in_seconds = max(seconds - meter.seconds(), LOOK_S)
    return solver


def _status(
    solver: cp_model.CpSolver, model: _Model, budgeted: BudgetedEvaluator
) -> cp_model.CpSolverStatus:
    """Solve in a thread of its own; this one handles Ctrl-C, and stops the solver if asked to."""
    should_stop = budgeted.meter.request.should_stop
    with ThreadPoolExecutor(1, "exact") as thread:
        solving = thread.submit(solver.solve, model.model, _Replay(model, budgeted))
        try:
            while wait([solving], LOOK_S).not_done:
                if should_stop is not None and should_stop():
                    solver.stop_search()
        finally:
            while wait([solving], 0.0).not_done:
                solver.stop_search()  # of no effect before the search has begun
                wait([solving], LOOK_S)
    return solving.result()


class _Model:
    """CP-SAT model of a problem; times in nanoseconds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        self.horizon = _horizon_ns(problem)
        self.is_on = self._choices()
        self.start = [
            self.model.new_int_var(0, self.horizon, f"start {i}") for i in range(problem.op_count)
        ]
        self.end = [
            self.model.new_int_var(0, self.horizon, f"end {i}") for i in range(problem.op_count)
        ]
        self._queues: dict[int, list[cp_model.IntervalVar]] = {}
        self._run_ops()
        self._send()
        for intervals in self._queues.values():
            self.model.add_no_overlap(intervals)
        self._fit()
        self.step = self.model.new_int_var(0, self.horizon, "step")
        self.model.add_max_equality(self.step, self.end)
        self.model.minimize(self.step)

    def _choices(self) -> list[dict[int, cp_model.IntVar]]:
        """Return, for each op, {device: Boolean variable}; members of a group share theirs."""
        rows = units(self.problem)
        of_unit = []
        for unit, row in enumerate(rows.allowed):
            choice = {
                d: self.model.new_bool_var(f"{unit} on {d}") for d in np.flatnonzero(row).tolist()
            }
            self.model.add_exactly_one(choice.values())
            of_unit.append(choice)
        return [of_unit[unit] for unit in rows.group_of.tolist()]

    def _run_ops(self) -> None:
        running: dict[int, list[cp_model.IntervalVar]] = {}
        for i, choice in enumerate(self.is_on):
            for d, chosen in choice.items():
                cost = int(self.problem.cost_ns[i, d])
                interval = self.model.new_optional_interval_var(
                    self.start[i], cost, self.end[i], chosen, f"{i} runs on {d}"
                )
                running.setdefault(d, []).append(interval)
        for intervals in running.values():
            self.model.add_no_overlap(intervals)

    def _send(self) -> None:
        graph = self.problem.graph
        source = edge_sources(graph)
        for i in range(len(graph)):
            edges = np.flatnonzero(source == i).tolist()
            for e in edges:
                self.model.add(self.start[int(graph.successors[e])] >= self.end[i])
            together = (
                [edges] if self.problem.cluster.once_per_destination else [[e] for e in edges]
            )
            for shared in together:
                for s, is_source in self.is_on[i].items():
                    for d in range(self.problem.device_count):
                        if d != s and shared:
                            self._transfer(i, shared, s, d, is_source)

    def _transfer(
        self, i: int, edges: list[int], s: int, d: int, is_source: cp_model.IntVar
    ) -> None:
        """Add one transfer of the output of op i from s to d, if any of the edges needs it."""
        graph, problem, model = self.problem.graph, self.problem, self.model
        readers = [
            (self.is_on[j][d], j, problem.transfer_ns(int(graph.edge_bytes[e]), s, d))
            for e in edges
            if d in self.is_on[j := int(graph.successors[e])]
        ]
        if not problem.connected[s, d]:
            for there, _, _ in readers:
                model.add_bool_or(is_source.negated(), there.negated())
            return
        if not readers:
            return
        name = f"{i}, {edges[0]} from {s} to {d}"
        sent = model.new_bool_var(name)
        longest = max(ns for _, _, ns in readers)
        duration = model.new_int_var(min(ns for _, _, ns in readers), longest, f"ns of {name}")
        begin = model.new_int_var(0, self.horizon, f"begin of {name}")
        arrival = model.new_int_var(0, self.horizon + longest, f"arrival of {name}")
        interval = model.new_optional_interval_var(begin, duration, arrival, sent, name)
        model.add(begin >= self.end[i]).only_enforce_if(sent)
        for there, j, ns in readers:
            model.add_bool_or(is_source.negated(), there.negated(), sent)
            model.add(self.start[j] >= arrival).only_enforce_if(is_source, there)
            model.add(duration >= ns).only_enforce_if(is_source, there)
        for queue in (int(problem.queue[s, d]), int(problem.second_queue[s, d])):
            if queue != NO_QUEUE:
                self._queues.setdefault(queue, []).append(interval)

    def _fit(self) -> None:
        """Limit the bytes that stay on a device for the whole step to its memory."""
        size = (self.problem.graph.resident_bytes + self.problem.held_bytes).tolist()
        for d, room in enumerate(self.problem.memory_bytes.tolist()):
            used = [size[i] * choice[d] for i, choice in enumerate(self.is_on) if d in choice]
            if used and sum(size) > room:
                self.model.add(sum(used) <= room)

    def hint(self, start: Candidate) -> None:
        """Suggest the devices of a candidate to the solver."""
        hinted = set()
        for choice, device in zip(self.is_on, start.devices.tolist(), strict=True):
            for d, chosen in choice.items():
                if chosen.index not in hinted:
                    hinted.add(chosen.index)
                    self.model.add_hint(chosen, int(d == device))


def _horizon_ns(problem: Problem) -> int:
    """Return an upper bound of steps without idle time: highest op costs, all edges sent."""
    extra_ns = 0 if problem.load is None else problem.load.extra_ns
    longest = (problem.cost_ns + extra_ns).max(axis=1).sum()
    slowest = 0.0
    for s, d in np.argwhere(problem.connected).tolist():
        if s != d:
            pair = problem.latency_s[s, d] + (
                problem.graph.edge_bytes / problem.bandwidth_bytes_per_s[s, d]
            )
            slowest = max(slowest, float(pair.sum()) * 1e9)
    copies = 1 if problem.cluster.once_per_destination else 2
    total = int(longest + copies * problem.device_count * slowest) + problem.graph.edge_count + 1
    return min(total, LONGEST_NS)


class _Replay(cp_model.CpSolverSolutionCallback):
    """Evaluates every solution with the simulator."""

    def __init__(self, model: _Model, budgeted: BudgetedEvaluator) -> None:
        super().__init__()
        self.model = model
        self.budgeted = budgeted

    def on_solution_callback(self) -> None:
        devices = np.array(
            [
                next(d for d, chosen in choice.items() if self.boolean_value(chosen))
                for choice in self.model.is_on
            ],
            np.int32,
        )
        start = np.array([self.value(var) for var in self.model.start])
        by_level = self.budgeted.evaluator.scheduling.bottom_level
        for priority in (by_start(self.model.problem, start), by_level):
            if self.budgeted.over():
                self.stop_search()
                return
            self.budgeted.evaluate(devices, priority)


def by_start(problem: Problem, start_ns: Longs) -> Floats:
    """Return priorities (N,) in the order of start times (N,), ties in topological order."""
    order = problem.graph.topological[
        np.argsort(start_ns[problem.graph.topological], kind="stable")
    ]
    priority = np.empty(problem.op_count)
    priority[order] = np.arange(problem.op_count, 0, -1)
    return priority
