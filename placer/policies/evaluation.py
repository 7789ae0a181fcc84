"""Evaluation of a policy on a suite, by family, with heuristics and untrained weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

import placer
from placer.policies.network import Policy, load, write_card
from placer.policies.pool import Exercise
from placer.policies.records import plain, record
from placer.policies.suites import Suite
from placer.policies.training.config import Ppo, TrainingConfig
from placer.policies.training.scores import (
    MEANING,
    by_family,
    heuristic_ratios,
    mean,
    scores,
    untrained_scores,
)

SEEDS: Final = 5
ALL: Final = "all"
ONE, BEST, UNTRAINED = "one decode", "best of 16", "untrained, best of 16"

Ratios: TypeAlias = NDArray[np.float64]
Progress = Callable[[float, str], None]


def evaluate(
    policy: Policy, suite: Suite, *, seeds: int = SEEDS, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the scores of a policy on a suite, as its card holds them.

    ``table`` holds, for every family and for all graphs, the geometric means of ratios to the best
    of single device, HEFT and ETF. ``seeds`` holds the means over all graphs for each sampling
    seed; the table has their medians. "untrained" are the initial weights of training: HEFT, and
    samples around it.

    Raises:
        ValueError: the card's ``config`` is invalid.
    """
    deviation = float(np.exp(_first_log_std(policy.card)))
    hear = progress or _silent
    hear(0.0, "drawing graphs")
    pool = suite.drawn()
    fixed: dict[str, Ratios] = dict(heuristic_ratios(pool))
    sampled: dict[str, list[Ratios]] = {BEST: [], UNTRAINED: []}
    for seed in range(seeds):
        hear((seed + 0.5) / (seeds + 0.5), f"decoding, seed {seed}")
        fixed[ONE], best = scores(policy, pool, seed)
        sampled[BEST].append(best)
        sampled[UNTRAINED].append(untrained_scores(deviation, pool, seed)[1])
    return {
        "suite": plain(suite),
        "scores_are": MEANING,
        "table": _table(pool, fixed, sampled),
        "seeds": [
            {"seed": seed, **{name: mean(runs[seed]) for name, runs in sampled.items()}}
            for seed in range(seeds)
        ],
        "version": placer.__version__,
    }


def write_into_card(path: Path, found: Mapping[str, Any]) -> None:
    """Write scores into the card of the policy at ``path``, replacing earlier ones of the suite.

    Raises:
        ValueError: it is no policy.
        OSError: the card cannot be written.
    """
    card: dict[str, Any] = json.loads(json.dumps(load(str(path)).card))
    card.setdefault("evaluations", {})[found["suite"]["name"]] = dict(found)
    write_card(path, card)


def _table(
    pool: Sequence[Exercise],
    fixed: Mapping[str, Ratios],
    sampled: Mapping[str, Sequence[Ratios]],
) -> dict[str, dict[str, float]]:
    rows = {ALL: np.ones(len(pool), np.bool_), **by_family(pool)}
    return {
        row: {
            "graphs": int(chosen.sum()),
            **{name: mean(ratios[chosen]) for name, ratios in fixed.items()},
            **{
                name: float(np.median([mean(ratios[chosen]) for ratios in runs]))
                for name, runs in sampled.items()
            },
        }
        for row, chosen in rows.items()
    }


def _first_log_std(card: Mapping[str, Any]) -> float:
    """Return the initial log standard deviation of actions in training."""
    if "config" not in card:  # old cards without a configuration
        return Ppo().log_std
    try:
        return record(TrainingConfig, card["config"]).ppo.log_std
    except ValueError as error:
        raise ValueError(f"the card of the policy: config: {error}") from error


def _silent(share: float, text: str) -> None:
    """Ignore progress."""
