"""How good plans are: at equal seconds, at equal evaluations, and against known optima.

    python -m benchmarks.search [--quick | --full]

All on one core, by the same simulator and the same clock, on the problems of
benchmarks/instances.py. Unless said, numbers are step times relative to the best of {single device,
HEFT, ETF}, geometric means over the problems: medians over five seeds with their range; smaller is
better. Ten-second budgets, planted optima and noise take one seed; with ``--full``, which takes two
hours, ten-second budgets take five. "Initial weights" is the same portfolio with the network that
training begins with: HEFT, and samples around it. `generalist` was trained on graphs of all these
families, `synthetic-only` on none. ``--quick`` takes one seed, and leaves out the ten-second
budgets.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.instances import communicating, judged, planted_instances, unseen
from benchmarks.simulator import cluster_of, flat_layered
from envs.problem import Problem
from placer.placers.annealing import Annealed
from placer.placers.placer import Placer
from placer.placers.portfolio import Portfolio
from placer.placers.registry import listings, placer_named
from placer.policies import Policy, load
from placer.policies.maskable import maskable_ppo
from placer.policies.network import ACTION_SCALE
from placer.policies.pool import Exercise
from placer.policies.training.config import Ppo
from placer.policies.training.scores import scores
from placer.search.budget import Budget
from placer.search.candidate import Candidate, ranked
from placer.search.decoder import HEFT, WEIGHT_COUNT
from placer.search.judge import Judge
from placer.search.portfolio import SENDERS, load_compiled_code

SEEDS = 5
POLICIES = ("synthetic-only", "generalist")
SHORT_S = (0.1, 1.0)
LONG_S = 10.0
EVALUATIONS = 1000
NOISE = 0.15
DRAWS = 12
LARGE_OPS = 100_000
LARGE_S = 20.0
MASKABLE_S = 10.0
WITH_MOVES = Annealed(senders=SENDERS)
TOO_SLOW = ("exact", "sequence-to-sequence")
"""For graphs of this size: the one proves, the other makes a hundred plans a second."""


class Initial:
    """What a policy proposes before it is trained."""

    def propose(
        self, judge: Judge, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """HEFT, with the deviation that training begins with."""
        spread = ACTION_SCALE * math.exp(Ppo().log_std)
        return np.array([HEFT]), np.full((1, WEIGHT_COUNT), spread)


@dataclass(frozen=True, slots=True)
class Scores:
    """Ratios of one way to search, (seeds, problems)."""

    name: str
    ratios: NDArray[np.float64]

    def means(self) -> list[float]:
        """Of each seed, in order of size."""
        return sorted(np.exp(np.log(self.ratios).mean(axis=1)).tolist())

    def median(self) -> float:
        return float(np.median(self.means()))

    def line(self) -> str:
        means = self.means()
        spread = f"   ({means[0]:.3f} to {means[-1]:.3f})" if len(means) > 1 else ""
        return f"  {self.name:42} {self.median():.3f}{spread}"


def main(quick: bool = False, full: bool = False) -> None:
    seeds = 1 if quick else SEEDS
    long_seeds = SEEDS if full else 1
    load_compiled_code()
    problems = judged()
    sizes = [item.judge.problem.op_count for item in problems]
    print(f"{len(problems)} problems of {min(sizes)} to {max(sizes)} ops, {seeds} seeds")
    policies = {name: load(name) for name in POLICIES}
    of_policies(policies, problems, seeds)
    every_placer(problems, policies["generalist"])
    for seconds in SHORT_S:
        at_budget(problems, Budget(seconds=seconds), policies, seeds)
    at_budget(problems, Budget(evaluations=EVALUATIONS), policies, seeds)
    each_training_seed(problems, policies["synthetic-only"], seeds)
    if not quick:
        at_budget(problems, Budget(seconds=LONG_S), policies, long_seeds, controls=False)
    others = unseen()
    print(f"{len(others)} problems by which nothing was chosen")
    of_policies(policies, others, seeds)
    for seconds in SHORT_S:
        at_budget(others, Budget(seconds=seconds), policies, seeds)
    each_training_seed(others, policies["synthetic-only"], seeds)
    heavy(policies, {1.0: seeds} if quick else {1.0: seeds, LONG_S: long_seeds})
    under_noise(problems, policies["generalist"])
    on_planted(policies["generalist"], 1.0 if quick else LONG_S)
    large(policies["generalist"])
    op_by_op(problems, policies["generalist"])


def of_policies(policies: dict[str, Policy], problems: Sequence[Exercise], seeds: int) -> None:
    """What policies propose, without a search."""
    medians = []
    for name, policy in policies.items():
        proposed = [scores(policy, problems, seed) for seed in range(seeds)]
        one = Scores(f"{name}, one decode", np.stack([proposed[0][0]]))
        best = Scores(f"{name}, best of 16", np.stack([best for _, best in proposed]))
        print(one.line(), best.line(), sep="\n")
        medians.append((one.median(), best.median()))
    losses = [unaware / aware - 1.0 for unaware, aware in zip(*medians, strict=True)]
    print(f"    {POLICIES[0]} loses {losses[0]:.1%} and {losses[1]:.1%} against {POLICIES[1]}")


def every_placer(problems: Sequence[Exercise], policy: Policy) -> None:
    """All placers that take graphs of this size, by name, one seed."""
    budget = Budget(evaluations=EVALUATIONS)
    print(f"every placer, {budget}")
    for listing in listings():
        if listing.name not in TOO_SLOW:
            placer = placer_named(listing.name, policy if listing.takes_policy else None)
            print(found(listing.name, placer, problems, budget, 1).line())


def at_budget(
    problems: Sequence[Exercise],
    budget: Budget,
    policies: dict[str, Policy],
    seeds: int,
    *,
    controls: bool = True,
) -> None:
    """Annealing, and the portfolio: with nothing learnt, with initial weights, with policies."""
    print(f"{budget}")
    annealing = found("annealing", placer_named("annealing"), problems, budget, seeds)
    print(annealing.line())
    if controls:
        print(found("  with the portfolio's moves", WITH_MOVES, problems, budget, seeds).line())
    unlearnt = {"without a policy": None, "with initial weights": Initial()} if controls else {}
    for name, proposer in unlearnt.items():
        print(found(f"portfolio {name}", Portfolio(proposer), problems, budget, seeds).line())
    medians: dict[str, float] = {}
    for name, policy in policies.items():
        own = found(f"portfolio with {name}", Portfolio(policy), problems, budget, seeds)
        print(own.line())
        against(own, annealing, problems, by_problem=not controls)
        medians[name] = own.median()
    if all(name in medians for name in POLICIES):
        unaware, aware = (medians[name] for name in POLICIES)
        print(f"    {POLICIES[0]} loses {unaware / aware - 1.0:.1%} against {POLICIES[1]}")


def against(
    own: Scores, other: Scores, problems: Sequence[Exercise], by_problem: bool = False
) -> None:
    """How a way to search compares with another, problem by problem."""
    relative = np.exp(np.log(own.ratios / other.ratios).mean(axis=0))
    worst = int(relative.argmax())
    mean = float(np.exp(np.log(relative).mean()))
    print(f"    / {other.name}: {mean:.3f}; worst {relative[worst]:.3f} ({problems[worst].family})")
    if by_problem:
        for k, item in enumerate(problems):
            mine, theirs = (np.median(each.ratios[:, k]) for each in (own, other))
            print(f"      {item.family:24} {mine:.3f}  {theirs:.3f}")


def each_training_seed(problems: Sequence[Exercise], policy: Policy, seeds: int) -> None:
    """What learning is worth, for each training seed alone."""
    budget = Budget(seconds=SHORT_S[0])
    print(f"{budget}, each training seed of {policy.name} alone")
    initial = found("initial weights", Portfolio(Initial()), problems, budget, seeds)
    print(initial.line())
    print(found("without a policy", Portfolio(), problems, budget, seeds).line())
    alone = [replace(policy, others=()), *policy.others]
    own = [
        found(f"seed {number}", Portfolio(member), problems, budget, seeds)
        for number, member in zip(training_seeds(policy), alone, strict=True)
    ]
    for each in own:
        print(f"{each.line()}   initial / this {initial.median() / each.median():.3f}")
    mean = float(np.exp(np.mean([np.log(each.median()) for each in own])))
    print(f"    initial / geometric mean of the seeds: {initial.median() / mean:.3f}")


def training_seeds(policy: Policy) -> list[int]:
    """Of a policy and its others, in their order."""
    return [policy.card["seed"], *policy.card["others"]]


def heavy(policies: dict[str, Policy], seeds: dict[float, int]) -> None:
    """Four times as much to send as to compute; ``seeds`` by seconds."""
    problems = communicating()
    print("communication-heavy")
    for seconds, count in seeds.items():
        budget = Budget(seconds=seconds)
        annealing = found(
            f"annealing, {budget}", placer_named("annealing"), problems, budget, count
        )
        print(annealing.line())
        print(found("  with the portfolio's moves", WITH_MOVES, problems, budget, count).line())
        for name, policy in policies.items():
            own = found(f"{name}, {budget}", Portfolio(policy), problems, budget, count)
            print(own.line())
            against(own, annealing, problems)


def under_noise(problems: Sequence[Exercise], policy: Policy) -> None:
    """What remains of the gain over the best heuristic when all costs and sizes are wrong."""
    nominal, noisy = [], []
    for item in problems:
        plans = [
            ranked(item.known)[0],
            Portfolio(policy).place(item.judge.problem, Budget(seconds=1.0), 0)[0],
        ]
        nominal.append([plan.step_ns for plan in plans])
        costs = [perturbed_costs(item.judge.problem, plans, draw) for draw in range(DRAWS)]
        noisy.append(np.mean(costs, axis=0))
    gain, left = (
        -float(np.log(np.array(steps)[:, 1] / np.array(steps)[:, 0]).mean())
        for steps in (nominal, noisy)
    )
    print(
        f"costs and sizes off by {NOISE:.0%}: {left / gain:.0%} of the gain over the best "
        f"heuristic remains ({math.exp(-gain):.3f} becomes {math.exp(-left):.3f})"
    )


def perturbed_costs(problem: Problem, plans: Sequence[Candidate], draw: int) -> NDArray[np.int64]:
    """Steps of plans on a problem whose costs and bytes are log-normally off."""
    rng = np.random.default_rng(draw)
    graph = problem.graph
    cost_factor = np.exp(NOISE * rng.standard_normal(len(graph)))
    byte_factor = np.exp(NOISE * rng.standard_normal(len(graph.edge_bytes)))
    changed = replace(
        graph,
        cost_s={kind: cost * cost_factor for kind, cost in graph.cost_s.items()},
        edge_bytes=(graph.edge_bytes * byte_factor).round().astype(np.int64),
    )
    judge = Judge(Problem.of(changed, problem.cluster))
    devices = np.array([plan.devices for plan in plans])
    return judge.costs(devices, np.array([plan.priority for plan in plans]))


def on_planted(policy: Policy, seconds: float) -> None:
    """The gap to optima that are known."""
    gaps = []
    for item, made in planted_instances():
        best = Portfolio(policy).place(item.judge.problem, Budget(seconds=seconds), 0)[0]
        gaps.append(best.step_ns / (made.step_s * 1e9) - 1.0)
    print(
        f"planted optima, {len(gaps)} problems, {seconds:g} s: median gap {np.median(gaps):.2%}, "
        f"worst {max(gaps):.2%}"
    )


def large(policy: Policy) -> None:
    """Many ops."""
    began = time.perf_counter()
    problem = Problem.of(flat_layered(LARGE_OPS, 64, seed=3), cluster_of(8))
    plans = Portfolio(policy).place(problem, Budget(seconds=LARGE_S), 0)
    spent = time.perf_counter() - began
    [heft] = [plan for plan in plans if plan.name == "HEFT"]
    ratio = plans[0].step_ns / heft.step_ns
    print(f"{LARGE_OPS:,} ops on 8 devices: {spent:.1f} s, {ratio:.4f} of HEFT ({plans[0].name})")


def op_by_op(problems: Sequence[Exercise], policy: Policy) -> None:
    """Plain deep RL, which learns from nothing within its budget."""
    smallest = min(problems, key=lambda item: item.judge.problem.op_count)
    problem = smallest.judge.problem
    plan = maskable_ppo(problem, Budget(seconds=MASKABLE_S), seed=0)
    best = Portfolio(policy).place(problem, Budget(seconds=0.1), 0)[0]
    ratios = [smallest.ratio(each.step_ns) for each in (plan, best)]
    print(
        f"{smallest.family}, {problem.op_count} ops: MaskablePPO {ratios[0]:.3f} after "
        f"{MASKABLE_S:g} s, portfolio {ratios[1]:.3f} after 0.1 s"
    )


def found(
    name: str, placer: Placer, problems: Sequence[Exercise], budget: Budget, seeds: int
) -> Scores:
    """Ratios of a placer."""

    def ratio(item: Exercise, seed: int) -> float:
        return item.ratio(placer.place(item.judge.problem, budget, seed)[0].step_ns)

    return Scores(name, np.array([[ratio(p, seed) for p in problems] for seed in range(seeds)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="one seed, no ten-second budgets")
    effort.add_argument("--full", action="store_true", help="five seeds of ten-second budgets, too")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.full)
