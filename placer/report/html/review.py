"""Simulates an existing placement beside the heuristics, for a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from envs.placement import MadeBy, Placement
from envs.problem import Problem
from envs.simulator import Simulated
from placer.result import Result
from placer.search.candidate import Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.objectives import Objective

UNNAMED = "this placement"


def reviewed(
    problem: Problem, placement: Placement, cost_source: Mapping[str, str] | None = None
) -> Result:
    """Return an optimization result with this placement as the best, compared to the heuristics.

    Nothing is searched or run: measured times are those recorded in the placement.
    """
    placement.check(problem.graph, problem.cluster)
    objective = Objective(
        name=placement.objective,
        micro_batches=placement.micro_batches,
        in_flight=placement.in_flight,
    )
    simulated = Simulated(problem)
    devices, priority = placement.arrays()
    evaluator, name = Evaluator(problem), placement.made_by.placer or UNNAMED
    best = replace(
        evaluator.candidate(Kind.OTHER, devices, priority, name=name),
        prediction=objective.predict(simulated, placement),
    )
    candidates = [best]
    for candidate in heuristics(evaluator):
        made = replace(
            placement,
            devices=tuple(candidate.devices.tolist()),
            priority=tuple(candidate.priority.tolist()),
            made_by=MadeBy(placer=candidate.name),
            predicted=None,
            measured=None,
            replicas=None,
        )
        other = replace(candidate, prediction=objective.predict(simulated, made))
        is_same = (
            np.array_equal(candidate.devices, devices) and other.predicted_s == best.predicted_s
        )
        if not is_same:
            candidates.append(other)
    return Result(
        placement=placement,
        problem=problem,
        candidates=tuple(sorted(candidates, key=lambda candidate: candidate.predicted_s)),
        best=best,
        lower_bound_s=objective.lower_bound_s(problem),
        search_s=0.0,
        stopped=False,
        cost_source=dict(cost_source or {}),
    )
