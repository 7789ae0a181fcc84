"""Simulates an existing placement beside the heuristics, for a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import Simulated
from placer.objectives import Objective
from placer.outcome import Optimization, Row
from placer.search.heuristics import heuristics
from placer.search.judge import Judge

UNNAMED = "this placement"


def reviewed(
    problem: Problem, placement: Placement, cost_source: Mapping[str, str] | None = None
) -> Optimization:
    """Return an optimization result with this placement as the best, compared to the heuristics.

    Nothing is searched or run: measured times are those recorded in the placement.

    Raises:
        ValueError: the placement is not for this problem.
    """
    placement.check(problem.graph, problem.cluster)
    objective = Objective(
        name=placement.objective,
        micro_batches=placement.micro_batches,
        in_flight=placement.in_flight,
    )
    simulated = Simulated(problem)
    best = _row(objective, simulated, placement.made_by.placer or UNNAMED, placement)
    rows = [best]
    for plan in heuristics(Judge(problem)):
        if best.name in (plan.name, plan.title):  # it is this one
            continue
        made = Placement.of(
            problem.graph,
            problem.cluster,
            plan.devices,
            plan.priority,
            MadeBy(placer=plan.title),
        )
        other = replace(
            made,
            objective=placement.objective,
            micro_batches=placement.micro_batches,
            in_flight=placement.in_flight,
        )
        rows.append(_row(objective, simulated, plan.title, other))
    return Optimization(
        placement=placement,
        problem=problem,
        rows=tuple(sorted(rows, key=lambda row: row.predicted_s)),
        best=best,
        lower_bound_s=objective.lower_bound_s(problem),
        search_s=0.0,
        stopped=False,
        cost_source=dict(cost_source or {}),
    )


def _row(objective: Objective, simulated: Simulated, name: str, placement: Placement) -> Row:
    prediction = objective.predict(simulated, placement)
    return Row(
        name=name,
        placement=placement,
        predicted_s=prediction.value_s,
        peak_memory_bytes=dict(prediction.peak_memory_bytes),
        why=prediction.why,
        missing_bytes=prediction.missing_bytes,
        times_s=prediction.times_s,
    )
