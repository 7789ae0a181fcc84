"""The calibration of an optimization: op costs fitted to the runs of its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envs.costs.factors import unplaced_factors
from envs.problem import Problem
from envs.simulator.fitting import fitted_factors, scaled_problem
from placer.choose import mispredicted, runs_contended
from placer.search.candidate import Candidate

if TYPE_CHECKING:
    from envs.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Problems with costs fitted to runs, and the candidate whose prediction was off before."""

    problem: Problem
    unplaced: Problem | None  # of the step on the one device of the unplaced model
    mispredicted: Candidate

    def problem_of(self, candidate: Candidate) -> Problem:
        """Return the problem that predicts a candidate."""
        return self.unplaced if candidate.is_unplaced and self.unplaced else self.problem


def calibration_of(
    candidates: Sequence[Candidate],
    problem: Problem,
    unplaced: Problem | None,
    runtime: Runtime | None,
) -> Calibration | None:
    """Fit op costs to the runs of candidates, and keep the factors with the costs of a runtime.

    Returns None where the predictions were good enough, or the runs cannot tell.
    """
    ran = [each for each in candidates if each.measurement and each.can_run]
    placed = [each for each in ran if not each.is_unplaced]
    if not placed or runs_contended(ran):
        return None
    factors = fitted_factors(
        problem,
        [each.placement for each in placed],
        [each.ranking_s(contended=False) for each in placed],
    )
    whole = next((each for each in ran if each.is_unplaced), None)
    if unplaced is not None and whole is not None and runtime is not None:
        unplaced = _fitted_unplaced(unplaced, whole, runtime)
    if runtime is not None:
        runtime.keep_factors(problem.cluster, factors)
    wrong = mispredicted(ran)
    if wrong is None:
        return None
    fitted = scaled_problem(problem, factors)
    return Calibration(problem=fitted, unplaced=unplaced, mispredicted=wrong)


def _fitted_unplaced(problem: Problem, candidate: Candidate, runtime: Runtime) -> Problem:
    """Fit the costs of the unplaced model to its step; return its problem with them."""
    of_ops = unplaced_factors(candidate.predicted_s, candidate.ranking_s(contended=False))
    factors = {problem.cluster.devices[0].kind: of_ops}
    runtime.keep_factors(problem.cluster, factors)
    return scaled_problem(problem, factors)
