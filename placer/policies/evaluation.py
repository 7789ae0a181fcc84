"""Evaluation of a policy on a suite, by family, with heuristics and untrained weights.

Suites are named sets of graphs on clusters, in ``suites.toml`` beside the shipped policies::

    format = "placer-suites/1"

    [[suite]]
    name = "many-devices"
    about = "16 to 64 devices"
    families = ["layered", "moe"]     # of graphs/synthetic/families.py, or "reference"
    graphs = 42
    max_ops = 800
    seed = 4000000                    # of the graphs

    [suite.clusters]                  # see placer/policies/pool.py: Clusters
    devices = [16, 32, 64]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphs.strict_json import load_toml, table
from graphs.text import suggestion
from placer.policies.network import Policy, load, shipped, write_card
from placer.policies.pool import Clusters, Exercise, draw_pool, families
from placer.policies.records import Within, check_ranges, plain, record
from placer.policies.training.config import Graphs, Ops, Ppo, check_graphs
from placer.policies.training.scores import (
    MEANING,
    by_family,
    heuristic_ratios,
    mean,
    scores,
    untrained_scores,
)
from placer.progress import Silent
from placer.startup import VERSION

SEED: Final = 4_000_000
"""Default seed of suites; no graph for training, selection or testing is drawn from it."""
SEEDS: Final = 5
ALL: Final = "all"
ONE, BEST, UNTRAINED = "one decode", "best of 16", "untrained, best of 16"

Ratios: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A fixed set of graphs of some families on clusters."""

    name: str
    about: str = ""
    families: tuple[str, ...] = field(default_factory=families)
    graphs: Graphs = 56
    max_ops: Ops = 800
    seed: Annotated[int, Within(0, 2**63 - 1)] = SEED
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_graphs(self.families, self.graphs, self.max_ops)

    def drawn(self) -> list[Exercise]:
        """Return the graphs as exercises."""
        return draw_pool(self.seed, self.graphs, self.max_ops, self.families, self.clusters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suites:
    format: Literal["placer-suites/1"]
    suite: tuple[Suite, ...] = ()


def load_suites(path: Path | None = None) -> Mapping[str, Suite]:
    """Return the suites of a file by name, by default the shipped ones."""
    return load_toml(path or shipped() / "suites.toml", _by_name)


def _by_name(content: object) -> Mapping[str, Suite]:
    listed = record(_Suites, content).suite
    suites = {suite.name: suite for suite in listed}
    if len(suites) < len(listed):
        raise ValueError("two suites have one name")
    return suites


def suite_named(name: str, suites: Mapping[str, Suite]) -> Suite:
    """Return the suite with this name."""
    if name in suites:
        return suites[name]
    hint = suggestion(name, suites)
    raise ValueError(f"there is no suite {name!r}: there are {', '.join(suites)}{hint}")


def evaluate(
    policy: Policy,
    suite: Suite,
    *,
    seeds: int = SEEDS,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Return the scores of a policy on a suite, as its card holds them.

    ``table`` holds, for every family and for all graphs, the geometric means of ratios to the best
    of single device, HEFT and ETF. ``seeds`` holds the means over all graphs for each sampling
    seed; the table has their medians. "untrained" are the initial weights of training: HEFT, and
    samples around it.
    """
    deviation = float(np.exp(_first_log_std(policy.card)))
    report = progress or Silent().advance
    report(0.0, "drawing graphs")
    pool = suite.drawn()
    fixed: dict[str, Ratios] = dict(heuristic_ratios(pool))
    sampled: dict[str, list[Ratios]] = {BEST: [], UNTRAINED: []}
    for seed in range(seeds):
        report((seed + 0.5) / (seeds + 0.5), f"decoding, seed {seed}")
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
        "version": VERSION,
    }


def write_into_card(path: Path, evaluation: Mapping[str, Any]) -> None:
    """Write scores into the card of the policy at ``path``, replacing earlier ones of the suite."""
    card: dict[str, Any] = json.loads(json.dumps(load(str(path)).card))
    card.setdefault("evaluations", {})[evaluation["suite"]["name"]] = dict(evaluation)
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
    try:
        return record(Ppo, table(card.get("config", {}), "config").get("ppo", {}), "ppo").log_std
    except ValueError as error:
        raise ValueError(f"the card of the policy: {error}") from error
