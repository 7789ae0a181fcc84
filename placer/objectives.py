"""Objectives of a search: step time, time of each further micro-batch, or the largest load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from envs.bounds import load_bound_ns, lower_bound_ns, pace_ns
from envs.max_load import max_load_ns, used_bytes, why_overloaded
from envs.micro_batches import Pipeline
from envs.placement import OBJECTIVES, Placement, check_micro_batches
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulated
from placer.placers.placer import LATENCY, MAX_LOAD, Placer, Progress
from placer.placers.rule import sorted_for
from placer.search.budget import Budget
from placer.search.candidate import SINGLE, Candidate
from placer.search.heuristics import ETF_NAME, heuristics
from placer.search.judge import Judge

BALANCING: Final = 0.3
"""Share of a throughput search that balances loads."""
BALANCED: Final = "balanced loads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The simulator's prediction for a placement.

    ``value_s`` is the value of the objective, inf if infeasible.
    """

    value_s: float
    times_s: Mapping[str, float]  # "step_s" and the other times that are known
    peak_memory_bytes: Mapping[str, int]
    why: str = ""
    missing_bytes: int = 0  # memory shortfall summed over devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective, the number of micro-batches of a step and how many are in flight.

    ``latency`` is the time of one step with all its micro-batches; ``throughput`` the time of each
    further micro-batch, see :class:`envs.simulator.Simulated`; ``max-load`` the largest load, see
    :mod:`envs.max_load`.
    """

    name: str = "latency"
    micro_batches: int = 1
    in_flight: int | None = None  # None: one per device

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise ValueError(f"objective is {self.name!r}, not one of {', '.join(OBJECTIVES)}")
        check_micro_batches(self.micro_batches, self.in_flight)
        if self.name == "throughput" and self.micro_batches == 1:
            raise ValueError("throughput is that of several micro-batches: give 2 or more of them")
        if self.in_flight is not None and self.micro_batches == 1:
            raise ValueError("in_flight is of several micro-batches: give 2 or more of them")

    def search(
        self,
        problem: Problem,
        budget: Budget,
        seed: int,
        placer: Placer,
        *,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Candidate]:
        """Return the placer's candidates for a problem; the heuristics are always among them.

        A step with micro-batches is searched as the problem of all its copies, for throughput as
        well, since the step time follows it; the candidates keep the devices and priorities of the
        first copy. For throughput, a placer that supports max-load spends a share of the budget on
        balancing loads, as the busiest device sets the pace; its best candidate comes last.

        Raises:
            ValueError: the placer does not accept the problem.
        """
        balanced: list[Candidate] = []
        if self.name == "throughput" and MAX_LOAD in placer.objectives:
            loads = placer.place(
                problem,
                budget.part(BALANCING),
                seed,
                objective=MAX_LOAD,
                progress=_between(progress, 0.0, BALANCING),
                should_stop=should_stop,
            )
            balanced = [replace(loads[0], name=BALANCED)]
            budget = budget.part(1.0 - BALANCING)
            progress = _between(progress, BALANCING, 1.0)
        whole = problem
        if self.micro_batches > 1 and self.name != MAX_LOAD:
            whole = self._pipelined(problem)
        found = placer.place(
            whole,
            budget,
            seed,
            objective=self.name,
            progress=progress,
            should_stop=should_stop,
        )
        found = self._with_heuristics(whole, found)
        count = problem.op_count
        return [
            replace(
                plan,
                devices=plan.devices[:count],
                priority=plan.priority[:count],
                bound_ns=plan.bound_ns if self.name == LATENCY else None,  # a bound on the step
            )
            for plan in [*found, *balanced]
        ]

    def _with_heuristics(self, problem: Problem, found: list[Candidate]) -> list[Candidate]:
        names = {plan.name for plan in found}
        expected = {f"{SINGLE}{name}" for name in problem.cluster.names}
        if problem.device_count > 1:
            expected.add(ETF_NAME)
        if expected <= names:
            return found
        others = [plan for plan in heuristics(Judge(problem)) if plan.name not in names]
        return sorted_for(self.name, problem, [*others, *found])

    def predict(self, simulated: Simulated, placement: Placement) -> Prediction:
        """Simulate a placement and compute its largest load."""
        problem = simulated.problem
        [result] = simulated.evaluate([placement])
        _, schedule = simulated.run(placement)
        devices, _ = placement.arrays()
        load_ns = int(max_load_ns(problem, devices)[0])
        known = {"step_s": schedule.step_ns, "max_load_s": load_ns}
        times_s = {name: ns / 1e9 for name, ns in known.items() if ns < INFEASIBLE_NS}
        if result.period_s is not None:
            times_s["period_s"] = result.period_s
        feasible, why, needed = result.feasible, result.why, schedule.peak_bytes
        if self.name == "max-load":
            feasible, why = load_ns < INFEASIBLE_NS, why_overloaded(problem, devices)
            needed = used_bytes(problem, devices)
        if self.name == "throughput" and feasible:
            why = result.why_no_period
        key = {"latency": "step_s", "throughput": "period_s", "max-load": "max_load_s"}[self.name]
        return Prediction(
            value_s=times_s.get(key, np.inf) if feasible else np.inf,
            times_s=times_s,
            peak_memory_bytes=result.peak_memory_bytes,
            why=why,
            missing_bytes=int(np.maximum(needed - problem.memory_bytes, 0).sum()),
        )

    def lower_bound_s(self, problem: Problem) -> float:
        """Return a lower bound on the objective over all placements.

        For throughput it is the work of the busiest device, without the optimizer, which runs once
        per step.

        Raises:
            ValueError: no placement can run because a link is missing.
        """
        if self.name == "max-load":
            return load_bound_ns(problem) / 1e9
        if self.name == "throughput":
            return pace_ns(problem, optimizer=False) / 1e9
        if self.micro_batches > 1:
            problem = self._pipelined(problem)
        return lower_bound_ns(problem) / 1e9

    def _pipelined(self, problem: Problem) -> Problem:
        return Pipeline.of(problem, self.micro_batches, in_flight=self.in_flight).problem


def _between(progress: Progress | None, begin: float, end: float) -> Progress | None:
    if progress is None:
        return None
    return lambda share, text: progress(begin + (end - begin) * share, text)
