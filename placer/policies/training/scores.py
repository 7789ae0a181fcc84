"""Scores of policies on graphs: ratios to the best of single device, HEFT and ETF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placer.policies.decoders import Decoders, InProcess
from placer.policies.network import ACTION_SCALE, Policy
from placer.policies.pool import Exercise
from placer.search.candidate import Kind
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT

MEANING: Final = "geometric mean of step / best of {single device, HEFT, ETF}, simulated"
MEASURED: Final = MEANING.replace("simulated", "measured")
DECODES: Final = 16
SAMPLES: Final = DECODES - 1
HEURISTICS: Final = {"single": Kind.SINGLE_DEVICE, "HEFT": Kind.HEFT, "ETF": Kind.ETF}
"""{name in tables: kind of candidates}."""


def scores(
    policy: Policy, pool: Sequence[Exercise], seed: int = 0, decoders: Decoders | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ratios (len(pool),) of one decode, and of the best of sixteen with ``seed``.

    The sixteen are the proposals of the policy and its others, and samples around the best of
    these. ``decoders`` hold the pool, by default with simulated steps.
    """
    proposals = [policy.proposals(item.summary) for item in pool]
    return _decoded(pool, proposals, seed, decoders)


def untrained_scores(
    deviation: float,
    pool: Sequence[Exercise],
    seed: int = 0,
    decoders: Decoders | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ratios of HEFT, and of the best of HEFT and 15 random weights around it.

    ``deviation`` is the standard deviation of actions.
    """
    spread = np.full((1, WEIGHT_COUNT), ACTION_SCALE * deviation)
    return _decoded(pool, [(HEFT[None], spread)] * len(pool), seed, decoders)


def heuristic_ratios(pool: Sequence[Exercise]) -> dict[str, NDArray[np.float64]]:
    """Return ratios (len(pool),) of the best single device, HEFT and ETF."""
    return {
        name: np.array(
            [item.ratio(min(c.step_ns for c in item.known if c.kind is kind)) for item in pool]
        )
        for name, kind in HEURISTICS.items()
    }


def baselines(
    deviation: float, pool: Sequence[Exercise], decoders: Decoders | None = None
) -> dict[str, float]:
    """Return scores of the heuristics, and of untrained weights: HEFT and 15 weights around it.

    ``deviation`` is the initial standard deviation of actions.
    """
    known = {name: mean(ratios) for name, ratios in heuristic_ratios(pool).items()}
    untrained = untrained_scores(deviation, pool, decoders=decoders)[1]
    return {**known, "untrained, best of 16": mean(untrained)}


def table(
    pool: Sequence[Exercise], alone: NDArray[np.float64], sampled: NDArray[np.float64]
) -> dict[str, Any]:
    """Return scores over all graphs and by family."""
    rows: dict[str, Any] = {"mean": mean(alone), "best_of_16": mean(sampled)}
    for family, chosen in by_family(pool).items():
        rows[family] = {"mean": mean(alone[chosen]), "best_of_16": mean(sampled[chosen])}
    return rows


def by_family(pool: Sequence[Exercise]) -> dict[str, NDArray[np.bool_]]:
    """Return {family: mask of its items in the pool, (len(pool),)}."""
    of_family = np.array([item.family for item in pool])
    return {str(family): of_family == family for family in dict.fromkeys(of_family.tolist())}


def mean(ratios: NDArray[np.float64]) -> float:
    """Return the geometric mean, rounded to 4 decimals."""
    return round(float(np.exp(np.log(ratios).mean())), 4)


def _decoded(
    pool: Sequence[Exercise],
    proposals: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
    seed: int,
    decoders: Decoders | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    decoders = decoders or InProcess([item.evaluator for item in pool])
    alone, sampled = [], []
    for number, (item, (all_means, deviations)) in enumerate(zip(pool, proposals, strict=True)):
        rng = np.random.default_rng([seed, number] if seed else number)
        means = all_means[:DECODES]
        normal = rng.standard_normal((SAMPLES, WEIGHT_COUNT))[: DECODES - len(means)]
        costs = decoders.costs(np.full(len(means), number), means)
        best = int(costs.argmin())
        tried = means[best] + deviations[best] * normal
        more = decoders.costs(np.full(len(tried), number), tried)
        alone.append(item.ratio(int(costs[0])))
        sampled.append(item.ratio(int(min(costs.min(), more.min(initial=costs.min())))))
    return np.array(alone), np.array(sampled)
