"""Quality of search results: annealing, and the portfolio with and without trained policies.

    python -m benchmarks search [--quick | --full] [--seeds N]

Everything runs on one core, with the same simulator and the same clock, on the problems of
benchmarks/instances.py. Unless stated otherwise, numbers are step times relative to the best of
{single device, HEFT, ETF}, geometric means over the problems: medians over five seeds with their
range; smaller is better. Ten-second budgets use one seed; with ``--full``, which takes two hours,
five. "Initial weights" is the same portfolio with the untrained network: HEFT, and samples around
it. `generalist` was trained on graphs of all these families, `synthetic-only` on none. ``--quick``
has one seed of the shortest parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.instances import communicating, judged, unseen
from benchmarks.quality import Scores, searched
from benchmarks.record import Effort, Part
from benchmarks.simulator import cluster_of, flat_layered
from benchmarks.tables import Table, spread
from envs.problem import Problem
from placer.policies import Policy, load
from placer.policies.network import ACTION_SCALE
from placer.policies.pool import Exercise
from placer.policies.training.config import Ppo
from placer.policies.training.scores import scores
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from placer.search.portfolio import SENDERS, AnnealingPlacer, Portfolio
from placer.search.registry import placer_named
from placer.search.request import Budget, Placer, SearchRequest

POLICIES: Final = ("synthetic-only", "generalist")
SHORT_S: Final = (0.1, 1.0)
LONG_S: Final = 10.0
EVALUATIONS: Final = 1000
NOISE: Final = 0.15
DRAWS: Final = 12
LARGE_OPS: Final = 100_000
LARGE_S: Final = 20.0
QUICK_PARTS: Final = ("policies", "0.1s")
WITH_MOVES: Final = AnnealingPlacer(senders=SENDERS)


class Initial:
    """The proposals of a policy before it is trained."""

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return HEFT, with the deviation that training begins with."""
        deviation = ACTION_SCALE * math.exp(Ppo().log_std)
        return np.array([HEFT]), np.full((1, WEIGHT_COUNT), deviation)


class Subjects:
    """Problems and policies, made on first use."""

    @cached_property
    def judged(self) -> list[Exercise]:
        return judged()

    @cached_property
    def unseen(self) -> list[Exercise]:
        return unseen()

    @cached_property
    def communicating(self) -> list[Exercise]:
        return communicating()

    @cached_property
    def policies(self) -> dict[str, Policy]:
        load_compiled_code()
        return {name: load(name) for name in POLICIES}


def parts(effort: Effort) -> dict[str, Part]:
    """Return all parts by name; each takes the dict for its results."""
    of = Subjects()
    seeds = effort.seed_count(quick=1, normal=5, full=5)
    long_seeds = effort.seed_count(quick=1, normal=1, full=5)
    long = Budget(seconds=LONG_S)
    budgets = [*(Budget(seconds=s) for s in SHORT_S), Budget(evaluations=EVALUATIONS)]
    found: dict[str, Part] = {
        "policies": lambda out: of_policies(of.policies, of.judged, seeds, out),
        **{
            f"{budget}": partial(
                lambda budget, out: at_budget(of.judged, budget, of.policies, seeds, out), budget
            )
            for budget in budgets
        },
        f"{long}": lambda out: at_budget(of.judged, long, of.policies, long_seeds, out, False),
        "training-seeds": lambda out: each_training_seed(
            of.judged, of.policies["synthetic-only"], seeds, out
        ),
        "unseen": lambda out: on_unseen(of, seeds, out),
        "noise": lambda out: under_noise(of.judged, of.policies["generalist"], seeds, out),
        "large": lambda out: large(of.policies["generalist"], out),
        "communication-1s": lambda out: heavy(of, Budget(seconds=SHORT_S[1]), seeds, out),
        f"communication-{long}": lambda out: heavy(of, long, long_seeds, out),
    }
    if effort.level == "quick":
        return {name: found[name] for name in QUICK_PARTS}
    return found


def of_policies(
    policies: Mapping[str, Policy], problems: Sequence[Exercise], seeds: int, out: dict[str, Any]
) -> Table:
    """Score the proposals of policies, without a search."""
    found = []
    for name, policy in policies.items():
        proposed = [scores(policy, problems, seed) for seed in range(seeds)]
        found.append(Scores(f"{name}, one decode", np.stack([proposed[0][0]])))
        found.append(Scores(f"{name}, best of 16", np.stack([best for _, best in proposed])))
    out |= {each.name: each.to_dict() for each in found}
    return score_table(f"Policies alone, {len(problems)} problems", seeds, found)


def at_budget(
    problems: Sequence[Exercise],
    budget: Budget,
    policies: Mapping[str, Policy],
    seeds: int,
    out: dict[str, Any],
    controls: bool = True,
) -> Table:
    """Compare annealing with the portfolio: no policy, initial weights, and trained policies."""
    placers: dict[str, Placer] = {"annealing": placer_named("annealing")}
    if controls:
        placers["annealing with the portfolio's moves"] = WITH_MOVES
        placers["portfolio without a policy"] = Portfolio()
        placers["portfolio with initial weights"] = Portfolio(Initial())
    placers |= {f"portfolio with {name}": Portfolio(policy) for name, policy in policies.items()}
    return compared(f"{budget}, {len(problems)} problems", placers, problems, budget, seeds, out)


def compared(
    title: str,
    placers: Mapping[str, Placer],
    problems: Sequence[Exercise],
    budget: Budget,
    seeds: int,
    out: dict[str, Any],
) -> Table:
    """Search with every placer and compare the portfolios with annealing, problem by problem."""
    found = [searched(name, placer, problems, budget, seeds) for name, placer in placers.items()]
    annealing = found[0]
    for own in found:
        out[own.name] = own.to_dict()
        if own.name.startswith("portfolio with "):
            out[own.name]["to annealing"] = relative(own, annealing, problems)
    out["problems"] = [item.family for item in problems]
    return score_table(title, seeds, found)


def relative(own: Scores, other: Scores, problems: Sequence[Exercise]) -> dict[str, Any]:
    """Return the mean and the worst ratio of two algorithms over the problems."""
    ratios = np.exp(np.log(own.ratios / other.ratios).mean(axis=0))
    worst = int(ratios.argmax())
    return {
        "mean": float(np.exp(np.log(ratios).mean())),
        "worst": float(ratios[worst]),
        "worst_problem": problems[worst].family,
    }


def score_table(title: str, seeds: int, found: Iterable[Scores]) -> Table:
    """Return a row for each search algorithm."""
    note = f"step / best of {{single device, HEFT, ETF}}, geometric mean, {seeds} seeds"
    rows = tuple((own.name, spread(own.means(), ".3f")) for own in found)
    return Table(f"Search, {title}", note, ("search algorithm", "ratio"), rows)


def alone(policy: Policy) -> dict[str, Policy]:
    """Return the policy of each training seed by the seed's name."""
    seeds = [policy.card["seed"], *policy.card["others"]]
    members = [replace(policy, others=()), *policy.others]
    return {f"seed {seed}": member for seed, member in zip(seeds, members, strict=True)}


def each_training_seed(
    problems: Sequence[Exercise], policy: Policy, seeds: int, out: dict[str, Any]
) -> Table:
    """Measure the gain of learning separately for each training seed."""
    budget = Budget(seconds=SHORT_S[0])
    initial = searched("initial weights", Portfolio(Initial()), problems, budget, seeds)
    unlearnt = searched("without a policy", Portfolio(), problems, budget, seeds)
    own = [
        searched(name, Portfolio(member), problems, budget, seeds)
        for name, member in alone(policy).items()
    ]
    mean = float(np.exp(np.mean([np.log(each.median()) for each in own])))
    out |= {each.name: each.to_dict() for each in (initial, unlearnt, *own)}
    out["initial / geometric mean of the seeds"] = initial.median() / mean
    title = f"{budget}, each training seed of {policy.name} alone, {len(problems)} problems"
    return score_table(title, seeds, (initial, unlearnt, *own))


def on_unseen(of: Subjects, seeds: int, out: dict[str, Any]) -> Table:
    """Repeat the comparisons on problems on which no idea was selected."""
    tables = [of_policies(of.policies, of.unseen, seeds, out.setdefault("policies", {}))]
    for seconds in SHORT_S:
        budget = Budget(seconds=seconds)
        own = out.setdefault(f"{budget}", {})
        tables.append(at_budget(of.unseen, budget, of.policies, seeds, own))
    own = out.setdefault("training-seeds", {})
    tables.append(each_training_seed(of.unseen, of.policies["synthetic-only"], seeds, own))
    return joined("Search, problems on which no idea was selected", tables)


def joined(title: str, tables: Sequence[Table]) -> Table:
    """Return one table with the titles of the others in front of their rows."""
    rows = tuple(
        (f"{table.title.removeprefix('Search, ')}: {row[0]}", *row[1:])
        for table in tables
        for row in table.rows
    )
    return replace(tables[0], title=title, rows=rows)


def heavy(of: Subjects, budget: Budget, seeds: int, out: dict[str, Any]) -> Table:
    """Compare searches on problems with four times as much communication as computation."""
    placers: dict[str, Placer] = {"annealing": placer_named("annealing")}
    if budget.seconds != LONG_S:
        placers["annealing with the portfolio's moves"] = WITH_MOVES
    placers |= {f"portfolio with {name}": Portfolio(policy) for name, policy in of.policies.items()}
    problems = of.communicating
    return compared(f"communication-heavy, {budget}", placers, problems, budget, seeds, out)


def under_noise(
    problems: Sequence[Exercise], policy: Policy, seeds: int, out: dict[str, Any]
) -> Table:
    """Measure how much of the gain over the best heuristic remains if costs and sizes are wrong."""
    found = sorted(_remains(problems, policy, seed) for seed in range(seeds))
    shares = [share for share, *_ in found]
    _, nominal, noisy = found[len(found) // 2]
    out |= {"shares": shares, "nominal": nominal, "noisy": noisy}
    return Table(
        f"Search, costs and sizes off by {NOISE:.0%}",
        "how much of the gain over the best heuristic remains",
        ("remaining gain", "ratio as planned", "ratio with errors"),
        ((spread(shares, ".0%"), f"{nominal:.3f}", f"{noisy:.3f}"),),
    )


def _remains(problems: Sequence[Exercise], policy: Policy, seed: int) -> tuple[float, float, float]:
    """Return the remaining share of the gain, and the mean ratios with right and wrong costs."""
    nominal, noisy = [], []
    for item in problems:
        plans = [
            ranked(item.known)[0],
            Portfolio(policy).place(
                SearchRequest(item.evaluator.problem, Budget(seconds=1.0), seed=seed)
            )[0],
        ]
        nominal.append([plan.step_ns for plan in plans])
        draws = range(DRAWS * seed, DRAWS * (seed + 1))
        costs = [perturbed_costs(item.evaluator.problem, plans, draw) for draw in draws]
        noisy.append(np.mean(costs, axis=0))
    gain, left = (
        -float(np.log(np.array(steps)[:, 1] / np.array(steps)[:, 0]).mean())
        for steps in (nominal, noisy)
    )
    return left / gain, math.exp(-gain), math.exp(-left)


def perturbed_costs(problem: Problem, plans: Sequence[Candidate], draw: int) -> NDArray[np.int64]:
    """Return step times of candidates on a problem with log-normal errors in costs and bytes."""
    rng = np.random.default_rng(draw)
    graph = problem.graph
    cost_factor = np.exp(NOISE * rng.standard_normal(len(graph)))
    byte_factor = np.exp(NOISE * rng.standard_normal(len(graph.edge_bytes)))
    changed = replace(
        graph,
        cost_s={kind: cost * cost_factor for kind, cost in graph.cost_s.items()},
        loaded_cost_s={kind: cost * cost_factor for kind, cost in graph.loaded_cost_s.items()},
        edge_bytes=(graph.edge_bytes * byte_factor).round().astype(np.int64),
    )
    evaluator = Evaluator(Problem.of(changed, problem.cluster))
    devices = np.array([plan.devices for plan in plans])
    return evaluator.costs(devices, np.array([plan.priority for plan in plans]))


def large(policy: Policy, out: dict[str, Any]) -> Table:
    """Run the portfolio on a large graph."""
    began = time.perf_counter()
    problem = Problem.of(flat_layered(LARGE_OPS, 64, seed=3), cluster_of(8))
    plans = Portfolio(policy).place(SearchRequest(problem, Budget(seconds=LARGE_S)))
    spent_s = time.perf_counter() - began
    [heft] = [plan for plan in plans if plan.kind is Kind.HEFT]
    ratio = plans[0].step_ns / heft.step_ns
    out |= {"ops": LARGE_OPS, "spent_s": spent_s, "to HEFT": ratio}
    return Table(
        "Search, large graph",
        f"portfolio with {policy.name}, {LARGE_S:g} s, 8 devices",
        ("ops", "seconds", "step / HEFT", "best"),
        ((f"{LARGE_OPS:,}", f"{spent_s:.1f}", f"{ratio:.4f}", plans[0].name),),
    )
