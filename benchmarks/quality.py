"""Quality of search results: against known optima, lower bounds, and each other at equal budgets.

    python -m benchmarks quality

Everything is simulated and runs on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import register_baselines
from benchmarks.instances import PLANTED, judged, planted_instances
from benchmarks.record import Effort, Part
from benchmarks.tables import Table, spread
from envs.simulator.bounds import lower_bound_ns
from placer.policies import Policy, load
from placer.policies.pool import Exercise
from placer.search.compilation import load_compiled_code
from placer.search.portfolio import Portfolio
from placer.search.registry import listings, placer_named
from placer.search.request import Budget, Placer, SearchRequest

NEURAL: Final = ("op-by-op", "sequence-to-sequence")
TOO_SLOW: Final = ("exact", *NEURAL)
"""For graphs of this size: the one proves, the others make a few plans to a hundred a second."""
BOUNDED: Final = ("inception 4", "nmt 4", "moe 4", "transformer 4")
COMPARED: Final = (*BOUNDED, "inception 4u", "nmt 8", "moe 4u", "layered 8")


@dataclass(frozen=True, slots=True)
class Scores:
    """Step times of one search algorithm relative to the best heuristic, (seeds, problems)."""

    name: str
    ratios: NDArray[np.float64]

    def means(self) -> list[float]:
        """Return the sorted geometric means of the seeds."""
        return sorted(np.exp(np.log(self.ratios).mean(axis=1)).tolist())

    def median(self) -> float:
        """Return the median of the seeds' means."""
        return float(np.median(self.means()))

    def to_dict(self) -> dict[str, Any]:
        """Return the median, the means of the seeds, and every ratio."""
        return {
            "median": self.median(),
            "means": self.means(),
            "ratios": self.ratios.round(5).tolist(),
        }


def searched(
    name: str, placer: Placer, problems: Sequence[Exercise], budget: Budget, seeds: int
) -> Scores:
    """Return the scores of a placer."""
    ratios = [
        [item.ratio(step_ns(placer, item, budget, seed)) for item in problems]
        for seed in range(seeds)
    ]
    return Scores(name, np.array(ratios))


def step_ns(placer: Placer, item: Exercise, budget: Budget, seed: int, *, workers: int = 1) -> int:
    """Return the step time of the best placement that a placer finds."""
    request = SearchRequest(item.evaluator.problem, budget, seed=seed, workers=workers)
    return placer.place(request)[0].step_ns


def planted_gaps(placer: Placer, budget: Budget, seeds: int, count: int) -> dict[str, list[float]]:
    """Return {problem: sorted gaps to the optimum that is known by construction, by seed}."""
    return {
        item.family: sorted(
            step_ns(placer, item, budget, seed) / (made.step_s * 1e9) - 1.0 for seed in range(seeds)
        )
        for item, made in planted_instances(count)
    }


def bound_gaps(
    placer: Placer, problems: Sequence[Exercise], budget: Budget, seeds: int
) -> dict[str, list[float]]:
    """Return {problem: sorted gaps to a lower bound, by seed}.

    No placement may reach the bound, so a gap is not only the placer's.
    """
    return {
        item.family: sorted(
            step_ns(placer, item, budget, seed) / lower_bound_ns(item.evaluator.problem) - 1.0
            for seed in range(seeds)
        )
        for item in problems
    }


def every_placer(
    problems: Sequence[Exercise], policy: Policy, budget: Budget, seeds: int
) -> list[Scores]:
    """Return the scores of all placers and baselines that accept graphs of this size."""
    register_baselines()
    found = []
    for listing in listings():
        if listing.name not in TOO_SLOW and listing.is_installed:
            placer = placer_named(listing.name, policy if listing.takes_policy else None)
            found.append(searched(listing.name, placer, problems, budget, seeds))
    return found


def gap_table(title: str, note: str, gaps: Mapping[str, Sequence[float]]) -> Table:
    """Return a row for each problem, and the median and the maximum of their medians."""
    rows = [(name, spread(of_seeds, ".1%")) for name, of_seeds in gaps.items()]
    medians = [float(np.median(of_seeds)) for of_seeds in gaps.values()]
    rows.append(("median of all", f"{np.median(medians):.2%}"))
    rows.append(("worst of all seeds", f"{max(map(max, gaps.values())):.2%}"))
    return Table(title, note, ("problem", "gap"), tuple(rows))


def placer_table(found: Mapping[str, Iterable[Scores]], problems: int) -> Table:
    """Return a row for each placer from ``{budget: scores}``."""
    cells = {
        (scores.name, budget): spread(scores.means(), ".3f")
        for budget, of_budget in found.items()
        for scores in of_budget
    }
    note = (
        "step / best of {single device, HEFT, ETF}, simulated, geometric mean of "
        f"{problems} problems"
    )
    rows = tuple(
        (name, *(cells.get((name, budget), "") for budget in found))
        for name in dict.fromkeys(name for name, _ in cells)
    )
    return Table("Placers", note, ("placer", *found), rows)


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts: known optima, lower bounds, all placers."""
    seeds = effort.seed_count(quick=1, normal=5, full=5)
    budget = Budget(seconds=effort.pick(quick=0.5, normal=2.0, full=10.0))
    note = f"{budget} of one core each" + f", median and range of {seeds} seeds" * (seeds > 1)

    def optima(found: dict[str, Any]) -> Table:
        count = effort.pick(quick=4, normal=len(PLANTED), full=len(PLANTED))
        gaps = planted_gaps(_portfolio(), budget, seeds, count)
        found["gaps"] = gaps
        title = "the portfolio above optima known by construction"
        return gap_table("Known optima", f"{title}, {note}", gaps)

    def bounds(found: dict[str, Any]) -> Table:
        gaps = bound_gaps(_portfolio(), problems_named(BOUNDED), budget, seeds)
        found["gaps"] = gaps
        title = "the portfolio above what no placement beats"
        return gap_table("Lower bounds", f"{title}, {note}", gaps)

    def placers(found: dict[str, Any]) -> Table:
        problems = problems_named(effort.pick(quick=BOUNDED, normal=COMPARED, full=COMPARED))
        evaluations = effort.pick(quick=300, normal=1000, full=1000)
        seconds = effort.pick(quick=0.1, normal=1.0, full=1.0)
        scores = {
            f"{equal}": every_placer(problems, load("generalist"), equal, seeds)
            for equal in (Budget(evaluations=evaluations), Budget(seconds=seconds))
        }
        for name, of_budget in scores.items():
            found[name] = {own.name: own.to_dict() for own in of_budget}
        return placer_table(scores, len(problems))

    def neural(found: dict[str, Any]) -> Table:
        register_baselines()
        problems = problems_named(BOUNDED)
        longer = Budget(seconds=effort.pick(quick=1.0, normal=60.0, full=300.0))
        runs = [
            *((name, placer_named(name), longer) for name in NEURAL),
            ("portfolio", _portfolio(), Budget(seconds=0.1)),
        ]
        scores = {
            f"{name}, {length}": searched(name, placer, problems, length, 1)
            for name, placer, length in runs
        }
        found.update({name: own.to_dict() for name, own in scores.items()})
        rows = [
            (name, *(f"{ratio:.3f}" for ratio in own.ratios[0]), f"{own.median():.3f}")
            for name, own in scores.items()
        ]
        note = "step / best of {single device, HEFT, ETF}; a network learns each problem"
        columns = ("placer", *(item.family for item in problems), "geometric mean")
        return Table("Op by op", note, columns, tuple(rows))

    named = {"optima": optima, "bounds": bounds, "placers": placers, "neural": neural}
    return {name: _loaded(part) for name, part in named.items()}


def problems_named(names: Sequence[str]) -> list[Exercise]:
    """Return the judged problems of these names."""
    return [item for item in judged() if item.family in names]


def _portfolio() -> Portfolio:
    return Portfolio(load("generalist"))


def _loaded(part: Callable[[dict[str, Any]], Table]) -> Part:
    """Return the part, with compiled code loaded before it: its time counts for no search."""

    def run(found: dict[str, Any]) -> Table:
        load_compiled_code()
        return part(found)

    return run
