"""How good plans are: against known optima, lower bounds, and each other at equal budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from envs.bounds import lower_bound_ns
from placer.bench.instances import PLANTED, planted_instances
from placer.bench.scores import Scores, searched
from placer.bench.table import Table, spread
from placer.placers.placer import Placer
from placer.placers.registry import listings, placer_named
from placer.policies import Policy
from placer.policies.pool import Exercise
from placer.search.budget import Budget
from placer.search.request import SearchRequest

TOO_SLOW: Final = ("exact", "sequence-to-sequence")
"""For graphs of this size: the one proves, the other makes a hundred plans a second."""
REFERENCE: Final = ("inception 4", "nmt 4", "moe 4", "transformer 4")


def planted_gaps(
    placer: Placer, budget: Budget, seeds: int, count: int = len(PLANTED)
) -> dict[str, list[float]]:
    """Distances to optima that are known by construction: {problem: sorted, one for each seed}."""
    found = {}
    for item, made in planted_instances()[:count]:
        steps = [step_ns(placer, item, budget, seed) for seed in range(seeds)]
        found[item.family] = sorted(step / (made.step_s * 1e9) - 1.0 for step in steps)
    return found


def bound_gaps(
    placer: Placer, problems: Sequence[Exercise], budget: Budget, seeds: int
) -> dict[str, list[float]]:
    """Distances to what no placement can beat: {problem: sorted, one for each seed}.

    The bound is none that can always be reached, so a distance is not all the placer's.
    """
    return {
        item.family: sorted(
            step_ns(placer, item, budget, seed) / lower_bound_ns(item.judge.problem) - 1.0
            for seed in range(seeds)
        )
        for item in problems
    }


def step_ns(placer: Placer, item: Exercise, budget: Budget, seed: int) -> int:
    """Of the best plan that a placer finds."""
    return placer.place(SearchRequest(item.judge.problem, budget, seed=seed))[0].step_ns


def every_placer(
    problems: Sequence[Exercise],
    policy: Policy,
    budget: Budget,
    seeds: int,
    heard: Callable[[Scores], None] = lambda scores: None,
) -> list[Scores]:
    """Ratios of all placers that take graphs of this size; each is told to ``heard`` at once."""
    found = []
    for listing in listings():
        if listing.name not in TOO_SLOW and listing.is_installed:
            placer = placer_named(listing.name, policy if listing.takes_policy else None)
            found.append(searched(listing.name, placer, problems, budget, seeds))
            heard(found[-1])
    return found


def gap_table(title: str, note: str, gaps: dict[str, list[float]]) -> Table:
    """Problems, and the worst of their medians."""
    rows = [(name, spread(of_seeds, ".1%")) for name, of_seeds in gaps.items()]
    medians = [float(np.median(of_seeds)) for of_seeds in gaps.values()]
    rows.append(("median of all", f"{np.median(medians):.1%}"))
    return Table(title, note, ("problem", "gap"), tuple(rows))


def placer_table(found: dict[str, list[Scores]], problems: int) -> Table:
    """Placers by budgets, ``{budget: ratios}``."""
    names = dict.fromkeys(scores.name for of_budget in found.values() for scores in of_budget)
    cells = {
        (budget, scores.name): spread(scores.means(), ".3f")
        for budget, of_budget in found.items()
        for scores in of_budget
    }
    return Table(
        "Placers",
        f"step / best of {{single device, HEFT, ETF}}, simulated, geometric mean of {problems} "
        "problems",
        ("placer", *found),
        tuple((name, *(cells.get((budget, name), "") for budget in found)) for name in names),
    )
