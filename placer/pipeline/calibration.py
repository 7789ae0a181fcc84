"""The calibration of an optimization: op costs fitted to the runs of its candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envs.costs.factors import unplaced_factors
from envs.problem import Problem
from envs.simulator.fitting import fitted_factors
from placer.choose import INEXACT, OFF, mispredicted, runs_contended
from placer.search.candidate import Candidate

if TYPE_CHECKING:
    from envs.runtime import Runtime


Factors = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors of op costs that explain runs of candidates."""

    factors: Factors  # of the problem's costs, {device kind: {class of ops: factor}}
    unplaced_factors: Factors  # of the costs of the unplaced model; none if it did not run
    mispredicted: Candidate | None  # whose prediction was off, by the costs without the factors

    def keep(self, runtime: Runtime, problem: Problem, unplaced: Problem | None) -> None:
        """Keep the factors with the costs that made the problems."""
        runtime.keep_factors(problem.cluster, self.factors)
        if unplaced is not None:
            runtime.keep_factors(unplaced.cluster, self.unplaced_factors, unplaced=True)


def calibration_of(
    candidates: Sequence[Candidate],
    problem: Problem,
    unplaced: Problem | None,
    *,
    is_last: bool = False,
) -> Calibration | None:
    """Fit op costs to the runs of candidates; return None where the runs cannot tell.

    After the last runs predictions count as wrong when they are a little off.
    """
    ran = [each for each in candidates if each.measurement and each.can_run and not each.eliminated]
    placed = [each for each in ran if not each.is_unplaced]
    if not placed or runs_contended(ran):
        return None
    factors = fitted_factors(
        problem,
        [each.placement for each in placed],
        [each.ranking_s(contended=False) for each in placed],
    )
    of_unplaced = {}
    whole = next((each for each in ran if each.is_unplaced), None)
    if unplaced is not None and whole is not None:
        found = unplaced_factors(whole.predicted_s, whole.ranking_s(contended=False))
        of_unplaced = {unplaced.cluster.devices[whole.devices[0]].kind: found}
    return Calibration(
        factors=factors,
        unplaced_factors=of_unplaced,
        mispredicted=mispredicted(ran, INEXACT if is_last else OFF, is_last=is_last),
    )
