"""Compares the search with and without policies on large graphs, with few decodes.

The same search runs with five kinds of proposals: none, where evolution begins with HEFT; initial
weights, which are HEFT and samples around it; random weights, which are five proposals at random;
and those of the trained policies. At equal decodes results do not depend on the machine. A budget
of N decodes also has two thirds as many moves of annealing, as the shares of the search are.

For reference, weights that a long evolution found on a smaller graph of the same maker, a sibling,
on the same devices, are proposed beside a policy's, and those that it found on the problem itself:
knowing the family, or even the problem, by a search is worth so much. Searches that take twelve
times as long show what is left to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality import Scores, step_ns
from benchmarks.record import Effort, Part
from benchmarks.search import POLICIES, Initial, alone
from benchmarks.tables import Table, spread
from placer.policies import load
from placer.policies.network import GENERALIST
from placer.policies.pool import Exercise
from placer.search.candidate import Candidate
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.evolution import POPULATION, SIGMA, Evolution
from placer.search.portfolio import EVOLUTION_SHARE, Portfolio
from placer.search.request import Budget
from placer.search.sampling import Proposer

if TYPE_CHECKING:
    from benchmarks.large_graphs.problems import Large

DECODES: Final = (16, 64, 256)
SECONDS: Final = (1.0, 5.0, 30.0)
DECODE, SECOND = "decodes", "s"
"""Units of budgets."""
PROPOSALS: Final = 5
EVOLVED_DECODES: Final = 400
LONGER: Final = 12
"""Factor by which the longer searches are longer."""


class RandomWeights(Initial):
    """Proposes weights at random around HEFT, as many as a trained policy does."""

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the same proposals for every problem, with the deviation of initial weights."""
        [heft], [deviation] = super().propose(evaluator, known)
        normal = np.random.default_rng(0).standard_normal((PROPOSALS, len(heft)))
        return heft + deviation * normal, np.tile(deviation, (PROPOSALS, 1))


@dataclass(frozen=True, slots=True, eq=False)
class WithWeights:
    """Proposes given weights (K,), then those of a policy."""

    weights: NDArray[np.float64]
    policy: Proposer

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return all means (M + 1, K); the deviations of the first are the policy's average."""
        means, deviations = self.policy.propose(evaluator, known)
        return (
            np.vstack([self.weights, means]),
            np.vstack([deviations.mean(axis=0), deviations]),
        )


def evolve_weights(
    item: Exercise, policy: Proposer, decodes: int, seed: int = 0
) -> NDArray[np.float64]:
    """Return the best weights (K,) of evolution from the policy's best proposal, which counts, too.

    Of ``decodes`` those are made that fill generations, beside the proposals.
    """
    decode = item.evaluator.decode
    rows, _ = policy.propose(item.evaluator, item.known)
    costs = decode(rows)[2]
    best, least = rows[costs.argmin()], int(costs.min())
    evolution = Evolution(best, sigma=SIGMA, seed=seed, population=POPULATION)
    for _ in range(decodes // POPULATION):
        rows = evolution.ask()
        costs = decode(rows)[2]
        evolution.tell(rows, costs)
        if costs.min() < least:
            best, least = rows[costs.argmin()], int(costs.min())
    return np.asarray(best)


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


def initial_and_default() -> dict[str, Proposer | None]:
    """Return initial weights and the default policy."""
    return {"initial weights": Initial(), GENERALIST: load(GENERALIST)}


def with_evolved(
    problem: Large, sibling: Large, decodes: int = EVOLVED_DECODES
) -> dict[str, Proposer | None]:
    """Return initial weights, the default policy, and the same beside evolved weights.

    They are evolved on a sibling, and on the problem itself. These searches are not counted.
    """
    policy = load(GENERALIST)
    found = initial_and_default()
    for whose, evolved_on in (("sibling's", sibling), ("its own", problem)):
        weights = evolve_weights(evolved_on.exercise(), policy, decodes)
        found[f"{GENERALIST}, {whose} weights"] = WithWeights(weights, policy)
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


def compared_with_evolved(
    pairs: Sequence[tuple[Large, Large]], amounts: Sequence[float], seeds: int, *, seconds: bool
) -> dict[float, list[Scores]]:
    """Return, by amount, the scores on problems with the proposals of :func:`with_evolved`."""
    found = [
        compared(with_evolved(problem, sibling), [problem], amounts, seeds, seconds=seconds)
        for problem, sibling in pairs
    ]
    return {
        amount: [
            Scores(of[0].name, np.concatenate([own.ratios for own in of], axis=1))
            for of in zip(*(each[amount] for each in found), strict=True)
        ]
        for amount in amounts
    }


def learning_table(
    title: str, problems: Sequence[Large], found: Mapping[float, Sequence[Scores]], *, unit: str
) -> Table:
    """Return a row for each kind of proposals: means over all and over parts of the problems.

    The parts are unequal devices, and families that ``synthetic-only`` was not trained on.
    """
    known = load(POLICIES[0]).card["trained_on"]["families"]
    of_parts = {
        ", unequal": np.array([problem.kinds != "e" for problem in problems]),
        ", new families": np.array([problem.name not in known for problem in problems]),
    }
    chosen = {"": np.ones(len(problems), np.bool_)}
    chosen |= {name: mask for name, mask in of_parts.items() if mask.any() and not mask.all()}
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


def table_by_problem(title: str, names: Sequence[str], found: Sequence[Scores]) -> Table:
    """Return a row for each problem with every kind of proposals, and the geometric means."""
    rows = [
        (name, *(spread(sorted(own.ratios[:, column].tolist()), ".3f") for own in found))
        for column, name in enumerate(names)
    ]
    rows.append(("geometric mean", *(spread(own.means(), ".3f") for own in found)))
    note = "step / best of {single device, HEFT, ETF}"
    return Table(title, note, ("problem", *(own.name for own in found)), tuple(rows))


def store(
    problems: Sequence[Large], found: Mapping[float, Sequence[Scores]], out: dict[str, Any]
) -> None:
    """Store every ratio in ``out``."""
    for amount, of_amount in found.items():
        out[f"{amount:g}"] = {own.name: own.to_dict() for own in of_amount}
    out["problems"] = [problem.label for problem in problems]


def parts(
    effort: Effort,
    problems: Sequence[Large],
    unseen: Sequence[Large],
    pairs: Sequence[tuple[Large, Large]],
    foreign: Sequence[Large],
) -> dict[str, Part]:
    """Return the parts: equal decodes and time, also on problems kept for the end; seeds; longer.

    The last ones compare with weights evolved on both of ``pairs`` of problem and sibling, and show
    every one of the ``foreign`` problems.
    """
    seeds = effort.seed_count(quick=1, normal=1, full=5)
    decodes = DECODES[: effort.pick(quick=1, normal=3, full=3)]
    lengths = SECONDS[: effort.pick(quick=1, normal=2, full=3)]
    short = lengths[:2]

    def part(
        title: str,
        of: Sequence[Large],
        amounts: Sequence[float],
        unit: str,
        out: dict[str, Any],
        *,
        arms: Callable[[], Mapping[str, Proposer | None]] = proposers,
    ) -> Table:
        load_compiled_code()
        found = compared(arms(), of, amounts, seeds, seconds=unit == SECOND)
        store(of, found, out)
        return learning_table(title, of, found, unit=unit)

    def evolved(amounts: Sequence[float], unit: str, out: dict[str, Any]) -> Table:
        load_compiled_code()
        found = compared_with_evolved(pairs, amounts, seeds, seconds=unit == SECOND)
        of = [problem for problem, _ in pairs]
        store(of, found, out)
        return learning_table("Learning, beside evolved weights", of, found, unit=unit)

    def foreign_graphs(out: dict[str, Any]) -> Table:
        load_compiled_code()
        found = compared(proposers(), foreign, short[-1:], seeds, seconds=True)
        store(foreign, found, out)
        title = f"Learning, graphs of a foreign generator, {short[-1]:g} s"
        return table_by_problem(title, [item.label for item in foreign], found[short[-1]])

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
            arms=training_seeds,
        ),
        "longer": partial(
            part,
            "Learning, and longer searches",
            problems,
            (short[-1], LONGER * short[-1]),
            SECOND,
            arms=initial_and_default,
        ),
        "evolved": partial(evolved, short, SECOND),
        "evolved-decodes": partial(evolved, decodes, DECODE),
        "foreign": foreign_graphs,
    }
