"""Objectives of a search: step time, time of each further micro-batch, or the largest load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from envs.placement import MOST_MICRO_BATCHES, OBJECTIVES, Placement, check_micro_batches
from envs.problem import HORIZON_NS, Floats, Ints, Problem
from envs.simulator import INFEASIBLE_NS, Simulated, Simulator
from envs.simulator.bounds import load_bound_ns, lower_bound_ns, pace_ns
from envs.simulator.max_load import loads_of, max_load_ns, overload_reason
from envs.simulator.micro_batches import Pipeline
from envs.simulator.schedule import Schedule
from envs.simulator.time_units import in_units, search_unit_ns
from graphs.strict_json import one_of
from placer.search.candidate import Candidate, Kind, Prediction
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics, ranked_by
from placer.search.request import LATENCY, MAX_LOAD, Placer, SearchRequest, candidates_of

BALANCING: Final = 0.3
"""Share of a throughput search that balances loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective, the number of micro-batches of a step and how many are in flight.

    ``latency`` is the time of one step with all its micro-batches; ``throughput`` the time of each
    further micro-batch, see :class:`envs.simulator.Simulated`; ``max-load`` the largest load, see
    :mod:`envs.simulator.max_load`.
    """

    name: str = "latency"
    micro_batches: int = 1
    in_flight: int | None = None  # None: one per device

    def __post_init__(self) -> None:
        one_of(self.name, OBJECTIVES, "objective")
        check_micro_batches(self.micro_batches, self.in_flight)
        if self.name == "throughput" and self.micro_batches == 1:
            raise ValueError("throughput is that of several micro-batches: give 2 or more of them")
        if self.name == "throughput" and 2 * self.micro_batches > MOST_MICRO_BATCHES:
            raise ValueError(
                f"throughput of {self.micro_batches} micro-batches is found by twice as many: give "
                f"{MOST_MICRO_BATCHES // 2} or fewer"
            )
        if self.in_flight is not None and self.micro_batches == 1:
            raise ValueError("in_flight is of several micro-batches: give 2 or more of them")

    def search(self, request: SearchRequest, placer: Placer) -> list[Candidate]:
        """Return the placer's candidates for this objective; the heuristics are always among them.

        A step with micro-batches is searched as the problem of all its copies, for throughput as
        well, since the step time follows it; the candidates keep the devices and priorities of the
        first copy. For throughput, a placer that supports max-load spends a share of the budget on
        balancing loads, as the busiest device sets the pace; its best candidate comes last.
        """
        unit_ns = search_unit_ns(request.problem, self.micro_batches, _known_ns(request.problem))
        shorter = in_units(request.problem, unit_ns)
        start = request.start
        request = replace(request, problem=shorter, unit_ns=unit_ns, start=None)
        balanced: list[Candidate] = []
        rest = replace(request, objective=self.name)
        if self.name == "throughput" and MAX_LOAD in placer.objectives:
            loads = candidates_of(placer, _part(request, MAX_LOAD, 0.0, BALANCING))
            kind = Kind.BALANCED_LOADS
            balanced = [replace(loads[0], kind=kind, name=kind.value)]
            rest = _part(request, self.name, BALANCING, 1.0)
        whole = problem = request.problem
        if self.micro_batches > 1 and self.name != MAX_LOAD:
            whole, start = self._pipelined(problem), None  # copies have priorities of their own
        if start is not None:
            start = Evaluator(whole).candidate(start.kind, start.devices, start.priority)
        found = candidates_of(placer, replace(rest, problem=whole, start=start))
        candidates = self._with_heuristics(whole, found)
        count = problem.op_count
        return [
            replace(
                candidate,
                devices=candidate.devices[:count],
                priority=candidate.priority[:count],
                step_ns=_in_ns(candidate.step_ns, unit_ns),
                # It was proved for the step.
                bound_ns=None
                if candidate.bound_ns is None or self.name != LATENCY
                else _in_ns(candidate.bound_ns, unit_ns),
            )
            for candidate in [*candidates, *balanced]
        ]

    def _with_heuristics(self, problem: Problem, candidates: list[Candidate]) -> list[Candidate]:
        kinds = [candidate.kind for candidate in candidates]
        if kinds.count(Kind.SINGLE_DEVICE) >= problem.device_count and (
            Kind.ETF in kinds or problem.device_count == 1
        ):
            return candidates
        known = {(c.kind, c.name) for c in candidates}
        others = [c for c in heuristics(Evaluator(problem)) if (c.kind, c.name) not in known]
        return ranked_by(self.name, problem, [*others, *candidates])

    def predict(
        self, simulated: Simulated, placement: Placement, schedule: Schedule | None = None
    ) -> Prediction:
        """Simulate a placement, unless its ``schedule`` is given, and compute its largest load."""
        problem = simulated.problem
        devices, _ = placement.arrays()
        step, schedule = simulated.result(placement, schedule)
        load_ns = int(max_load_ns(problem, devices)[0])
        times_s: dict[str, float] = {}
        if schedule.step_ns < INFEASIBLE_NS:
            times_s["step_s"] = schedule.step_ns / 1e9 + problem.graph.hand_over_s
        if load_ns < INFEASIBLE_NS:
            times_s["max_load_s"] = load_ns / 1e9
        if step.period_s is not None:
            times_s["period_s"] = step.period_s
        feasible, why, needed = step.feasible, step.why, schedule.peak_bytes
        if self.name == "max-load":
            feasible, why = load_ns < INFEASIBLE_NS, overload_reason(problem, devices)
            needed = loads_of(problem, devices).used_bytes
        if self.name == "throughput" and feasible:
            why = step.no_period_reason
        key = {"latency": "step_s", "throughput": "period_s", "max-load": "max_load_s"}[self.name]
        return Prediction(
            placement=placement,
            objective_s=times_s.get(key, np.inf) if feasible else np.inf,
            times_s=times_s,
            peak_memory_bytes=step.peak_memory_bytes,
            why=why,
            missing_bytes=int(np.maximum(needed - problem.memory_bytes, 0).sum()),
        )

    def lower_bound_s(self, problem: Problem) -> float:
        """Return a lower bound on the objective over all placements.

        For throughput it is the work of the busiest device, without the optimizer, which runs once
        per step. A ValueError says that no placement can run because a link is missing.
        """
        if self.name == "max-load":
            return load_bound_ns(problem) / 1e9
        if self.name == "throughput":
            return pace_ns(problem, optimizer=False) / 1e9
        if self.micro_batches > 1:
            problem = self._pipelined(problem)
        return lower_bound_ns(problem) / 1e9 + problem.graph.hand_over_s

    def _pipelined(self, problem: Problem) -> Problem:
        return Pipeline(problem, self.micro_batches, in_flight=self.in_flight).problem


def _part(request: SearchRequest, objective: str, begin: float, end: float) -> SearchRequest:
    """Return a request for the part of the budget between two shares of it."""

    def between(share: float, text: str) -> None:
        request.report(begin + (end - begin) * share, text)

    budget = request.budget.part(end - begin)
    return replace(request, objective=objective, budget=budget, progress=between)


def _known_ns(problem: Problem) -> int:
    """Return the shortest step of a single device that can hold all ops; 0 if all are short.

    Where none can, it is the shortest step of the heuristics, 0 if one of these is short.
    """
    sent = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
    longest_s = problem.cost_ns.max(axis=1).sum(dtype=np.float64) / 1e9
    longest_s += problem.graph.edge_count * problem.latency_s[sent].max(initial=0.0)
    slowest = problem.bandwidth_bytes_per_s[sent].min(initial=np.inf)
    longest_s += problem.graph.edge_bytes.sum(dtype=np.float64) / slowest
    if longest_s * 1e9 < HORIZON_NS:
        return 0
    count = problem.device_count
    devices = np.repeat(np.arange(count, dtype=np.int32)[:, None], problem.op_count, axis=1)
    if single_ns := _shortest_ns(problem, devices, np.zeros(devices.shape)):
        return single_ns
    known = heuristics(Evaluator(problem))
    if any(each.step_ns < INFEASIBLE_NS for each in known):
        return 0
    rows = [np.stack([getattr(each, name) for each in known]) for name in ("devices", "priority")]
    return _shortest_ns(problem, *rows)


def _shortest_ns(problem: Problem, devices: Ints, priority: Floats) -> int:
    """Return the shortest step of placements (B, N); 0 if none can run."""
    try:
        steps = Simulator(problem).step_ns(devices, priority)
    except ValueError:  # longer than any step may be
        return 0
    return int(steps.min()) if steps.min() < INFEASIBLE_NS else 0


def _in_ns(units: int, unit_ns: int) -> int:
    return units if units == INFEASIBLE_NS else units * unit_ns
