"""Compares the search with and without policies on large graphs, with few decodes.

The same search runs with five kinds of proposals: none, where evolution begins with HEFT; initial
weights, which are HEFT and samples around it; random weights, which are five proposals at random;
and those of the trained policies. At equal decodes results do not depend on the machine. A budget
of N decodes also has two thirds as many moves of annealing, as the shares of the search are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality import Scores, step_ns
from benchmarks.record import Effort, Part
from benchmarks.search import POLICIES, Initial, alone
from benchmarks.tables import Table, spread
from placer.policies import load
from placer.policies.pool import Exercise
from placer.search.candidate import Candidate
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.evolution import Proposer
from placer.search.portfolio import EVOLUTION_SHARE, Portfolio
from placer.search.request import Budget

if TYPE_CHECKING:
    from benchmarks.large_graphs.problems import Large

DECODES: Final = (16, 64, 256)
SECONDS: Final = (1.0, 5.0, 30.0)
DECODE, SECOND = "decodes", "s"
"""Units of budgets."""
PROPOSALS: Final = 5


class RandomWeights(Initial):
    """Proposes weights at random around HEFT, as many as a trained policy does."""

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the same proposals for every problem, with the deviation of initial weights."""
        [heft], [deviation] = super().propose(evaluator, known)
        normal = np.random.default_rng(0).standard_normal((PROPOSALS, len(heft)))
        return heft + deviation * normal, np.tile(deviation, (PROPOSALS, 1))


def proposers() -> dict[str, Proposer | None]:
    """Return all kinds of proposals by name."""
    return {
        "no policy": None,
        "initial weights": Initial(),
        "random weights": RandomWeights(),
        **{name: load(name) for name in POLICIES},
    }


def training_seeds() -> dict[str, Proposer | None]:
    """Return initial weights, and the policies of every training seed alone."""
    found: dict[str, Proposer | None] = {"initial weights": Initial()}
    for name in POLICIES:
        found |= {f"{name}, {seed}": member for seed, member in alone(load(name)).items()}
    return found


def budget_of(amount: float, item: Exercise, *, seconds: bool) -> Budget:
    """Return the budget of so many seconds, or of so many decodes beside the heuristics."""
    if seconds:
        return Budget(seconds=amount)
    return Budget(evaluations=len(item.known) + math.ceil(amount / EVOLUTION_SHARE))


def compared(
    of: Mapping[str, Proposer | None],
    problems: Sequence[Large],
    amounts: Sequence[float],
    seeds: int,
    *,
    seconds: bool,
) -> dict[float, list[Scores]]:
    """Return, by amount of decodes or seconds, the scores with every kind of proposals."""
    ratios = {amount: {name: np.ones((seeds, len(problems))) for name in of} for amount in amounts}
    for column, problem in enumerate(problems):
        item = problem.exercise()  # one at a time: a large one takes much memory
        for amount in amounts:
            budget = budget_of(amount, item, seconds=seconds)
            for seed in range(seeds):
                for name, proposer in of.items():
                    step = step_ns(Portfolio(proposer), item, budget, seed)
                    ratios[amount][name][seed, column] = item.ratio(step)
    return {
        amount: [Scores(name, of_name) for name, of_name in of_amount.items()]
        for amount, of_amount in ratios.items()
    }


def learning_table(
    title: str, problems: Sequence[Large], found: Mapping[float, Sequence[Scores]], *, unit: str
) -> Table:
    """Return a row for each kind of proposals: means over all and over unequal devices."""
    unequal = np.array([problem.kinds != "e" for problem in problems])
    chosen = {"": np.ones(len(problems), np.bool_), ", unequal": unequal}
    chosen = {name: mask for name, mask in chosen.items() if mask.any()}
    columns = [f"{amount:g} {unit}{name}" for amount in found for name in chosen]
    cells: dict[str, list[str]] = {}
    for of_amount in found.values():
        for own in of_amount:
            cells.setdefault(own.name, []).extend(
                spread(Scores(own.name, own.ratios[:, mask]).means(), ".3f")
                for mask in chosen.values()
            )
    note = f"step / best of {{single device, HEFT, ETF}}, {len(problems)} problems"
    rows = tuple((name, *row) for name, row in cells.items())
    return Table(title, note, ("proposals", *columns), rows)


def parts(effort: Effort, problems: Sequence[Large], unseen: Sequence[Large]) -> dict[str, Part]:
    """Return the parts: equal decodes, equal time, both on problems kept for the end, and seeds."""
    seeds = effort.seed_count(quick=1, normal=1, full=5)
    decodes = DECODES[: effort.pick(quick=1, normal=3, full=3)]
    lengths = SECONDS[: effort.pick(quick=1, normal=2, full=3)]

    def part(
        title: str,
        of: Sequence[Large],
        amounts: Sequence[float],
        unit: str,
        out: dict[str, Any],
        *,
        kinds: Callable[[], Mapping[str, Proposer | None]] = proposers,
    ) -> Table:
        load_compiled_code()
        found = compared(kinds(), of, amounts, seeds, seconds=unit == SECOND)
        for amount, of_amount in found.items():
            out[f"{amount:g}"] = {own.name: own.to_dict() for own in of_amount}
        out["problems"] = [f"{problem.name}, {problem.devices}{problem.kinds}" for problem in of]
        return learning_table(title, of, found, unit=unit)

    kept = "problems kept for the end"
    return {
        "decodes": partial(part, "Learning, equal decodes", problems, decodes, DECODE),
        "seconds": partial(part, "Learning, equal time", problems, lengths, SECOND),
        "unseen-decodes": partial(
            part, f"Learning, equal decodes, {kept}", unseen, decodes, DECODE
        ),
        "unseen-seconds": partial(part, f"Learning, equal time, {kept}", unseen, lengths, SECOND),
        "training-seeds": partial(
            part,
            "Learning, each training seed",
            problems,
            lengths[:1],
            SECOND,
            kinds=training_seeds,
        ),
    }
