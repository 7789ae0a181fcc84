"""The calibration of an optimization: op costs fitted to the runs of its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envs.costs.factors import Factors, unplaced_factors
from envs.problem import Problem
from envs.simulator.fitting import fitted_factors
from placer.choose import INEXACT, OFF, mispredicted, runs_contended
from placer.search.candidate import Candidate

if TYPE_CHECKING:
    from envs.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors of op costs that explain runs of candidates."""

    factors: Factors  # of the problem's costs
    unplaced_factors: Sequence[Factors]  # of each problem of the unplaced model; {} if not run
    mispredicted: Candidate | None  # whose prediction was off, by the costs without the factors

    def keep(self, runtime: Runtime, problem: Problem, unplaced: Sequence[Problem]) -> None:
        """Keep the factors with the costs that made the problems."""
        runtime.keep_factors(problem.cluster, self.factors)
        for each, factors in zip(unplaced, self.unplaced_factors, strict=True):
            runtime.keep_factors(each.cluster, factors, unplaced=True)


def calibration_of(
    candidates: Sequence[Candidate],
    problem: Problem,
    unplaced: Sequence[Problem],
    *,
    is_last: bool = False,
) -> Calibration | None:
    """Fit op costs to the runs of candidates; return None where the runs cannot tell.

    After the last runs predictions count as wrong when they are a little off.
    """
    ran = [each for each in candidates if each.measurement and each.can_run and not each.eliminated]
    placed = [each for each in ran if not each.is_unplaced]
    if not (ran if is_last else placed) or runs_contended(ran):
        return None
    factors = fitted_factors(
        problem,
        [each.placement for each in placed],
        [each.ranking_s(contended=False) for each in placed],
    )
    return Calibration(
        factors=factors,
        unplaced_factors=[_unplaced_factors(ran, each) for each in unplaced],
        mispredicted=mispredicted(ran, INEXACT if is_last else OFF, is_last=is_last),
    )


def _unplaced_factors(ran: Sequence[Candidate], problem: Problem) -> Factors:
    """Return the factors of the unplaced model that solves a problem; {} if it did not run."""
    for each in ran:
        if each.is_unplaced and each.placement.device_names == problem.cluster.names:
            found = unplaced_factors(each.predicted_s, each.ranking_s(contended=False))
            return {problem.cluster.devices[each.devices[0]].kind: found}
    return {}
