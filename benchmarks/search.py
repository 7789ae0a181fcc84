"""Quality of search results: at equal seconds, at equal evaluations, and against known optima.

    python -m benchmarks.search [--quick | --full] [--seeds N] [--out FILE] [PART ...]

Everything runs on one core, with the same simulator and the same clock, on the problems of
placer/bench/instances.py. Unless stated otherwise, numbers are step times relative to the best of
{single device, HEFT, ETF}, geometric means over the problems: medians over five seeds with their
range; smaller is better. Ten-second budgets use one seed; with ``--full``, which takes two hours,
five. "Initial weights" is the same portfolio with the untrained network: HEFT, and samples around
it. `generalist` was trained on graphs of all these families, `synthetic-only` on none. ``--quick``
uses one seed and skips the ten-second budgets.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Record
from envs.problem import Problem
from placer.bench.instances import communicating, judged, unseen
from placer.bench.quality import every_placer, planted_gaps
from placer.bench.scores import WITH_MOVES, Initial, Scores, compared, searched
from placer.bench.speed import cluster_of, flat_layered
from placer.placers.portfolio import Portfolio
from placer.placers.registry import placer_named
from placer.policies import Policy, load
from placer.policies.maskable import maskable_ppo
from placer.policies.pool import Exercise
from placer.policies.training.scores import scores
from placer.search.budget import Budget
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.compiling import load_compiled_code
from placer.search.judge import Judge
from placer.search.request import SearchRequest

POLICIES = ("synthetic-only", "generalist")
SHORT_S = (0.1, 1.0)
LONG_S = 10.0
EVALUATIONS = 1000
NOISE = 0.15
DRAWS = 12
LARGE_OPS = 100_000
LARGE_S = 20.0
MASKABLE_S = 10.0

Work = Callable[[dict[str, Any]], None]
"""A part of the benchmark: prints its results and stores them in the dict."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of seeds of short and of ten-second budgets; 0 skips the ten-second ones."""

    seeds: int = 5
    long_seeds: int = 1


QUICK, FULL = Effort(seeds=1, long_seeds=0), Effort(long_seeds=5)


class Subjects:
    """Problems and policies, made on first use."""

    @cached_property
    def judged(self) -> list[Exercise]:
        problems = judged()
        sizes = [item.judge.problem.op_count for item in problems]
        print(f"{len(problems)} problems of {min(sizes)} to {max(sizes)} ops")
        return problems

    @cached_property
    def unseen(self) -> list[Exercise]:
        problems = unseen()
        print(f"{len(problems)} problems by which nothing was chosen")
        return problems

    @cached_property
    def communicating(self) -> list[Exercise]:
        return communicating()

    @cached_property
    def policies(self) -> dict[str, Policy]:
        load_compiled_code()
        return {name: load(name) for name in POLICIES}

    @property
    def generalist(self) -> Policy:
        return self.policies["generalist"]


def parts(effort: Effort) -> dict[str, Work]:
    """Return all parts by name; each takes the dict for its results."""
    of, seeds, long_seeds = Subjects(), effort.seeds, effort.long_seeds
    budgets = [*(Budget(seconds=s) for s in SHORT_S), Budget(evaluations=EVALUATIONS)]
    long = Budget(seconds=LONG_S)
    found: dict[str, Work] = {
        "policies": lambda out: of_policies(of.policies, of.judged, seeds, out),
        **{
            f"{budget}": partial(
                lambda budget, out: at_budget(of.judged, budget, of.policies, seeds, out), budget
            )
            for budget in budgets
        },
        "training-seeds": lambda out: each_training_seed(
            of.judged, of.policies["synthetic-only"], seeds, out
        ),
        "unseen": lambda out: on_unseen(of, seeds, out),
        "noise": lambda out: under_noise(of.judged, of.generalist, seeds, out),
        "large": lambda out: large(of.generalist, out),
        "op-by-op": lambda out: op_by_op(of.judged, of.generalist, out),
        "communication-1s": lambda out: heavy(of, Budget(seconds=SHORT_S[1]), seeds, out),
        "planted": lambda out: on_planted(
            of.generalist, LONG_S if long_seeds else SHORT_S[1], max(long_seeds, 1), out
        ),
        "placers": lambda out: of_placers(of.judged, of.generalist, max(long_seeds, 1), out),
    }
    if long_seeds:
        found[f"{long}"] = lambda out: at_budget(
            of.judged, long, of.policies, long_seeds, out, controls=False
        )
        found[f"communication-{long}"] = lambda out: heavy(of, long, long_seeds, out)
    return found


def of_policies(
    policies: dict[str, Policy], problems: Sequence[Exercise], seeds: int, out: dict[str, Any]
) -> None:
    """Score the proposals of policies, without a search."""
    medians = []
    for name, policy in policies.items():
        proposed = [scores(policy, problems, seed) for seed in range(seeds)]
        one = Scores(f"{name}, one decode", np.stack([proposed[0][0]]))
        best = Scores(f"{name}, best of 16", np.stack([best for _, best in proposed]))
        print(one.line(), best.line(), sep="\n")
        out |= {each.name: each.to_dict() for each in (one, best)}
        medians.append((one.median(), best.median()))
    losses = [unaware / aware - 1.0 for unaware, aware in zip(*medians, strict=True)]
    print(f"    {POLICIES[0]} loses {losses[0]:.1%} and {losses[1]:.1%} against {POLICIES[1]}")


def of_placers(
    problems: Sequence[Exercise], policy: Policy, seeds: int, out: dict[str, Any]
) -> None:
    """Compare all placers that accept graphs of this size."""
    for budget in (Budget(evaluations=EVALUATIONS), Budget(seconds=SHORT_S[1])):
        print(f"every placer, {budget}, {seeds} seeds")
        found = every_placer(problems, policy, budget, seeds, lambda own: print(own.line()))
        out[f"{budget}"] = {own.name: own.to_dict() for own in found}


def at_budget(
    problems: Sequence[Exercise],
    budget: Budget,
    policies: dict[str, Policy],
    seeds: int,
    out: dict[str, Any],
    *,
    controls: bool = True,
) -> None:
    """Compare annealing with the portfolio: no policy, initial weights, and trained policies."""
    print(f"{budget}, {seeds} seeds")

    def tell(name: str, placer: Any) -> Scores:
        found = searched(name, placer, problems, budget, seeds)
        print(found.line())
        out[name.strip()] = found.to_dict()
        return found

    annealing = tell("annealing", placer_named("annealing"))
    if controls:
        tell("  with the portfolio's moves", WITH_MOVES)
        tell("portfolio without a policy", Portfolio())
        tell("portfolio with initial weights", Portfolio(Initial()))
    medians: dict[str, float] = {}
    for name, policy in policies.items():
        own = tell(f"portfolio with {name}", Portfolio(policy))
        out[own.name]["to annealing"] = compared(own, annealing, problems, by_problem=not controls)
        medians[name] = own.median()
    if all(name in medians for name in POLICIES):
        unaware, aware = (medians[name] for name in POLICIES)
        print(f"    {POLICIES[0]} loses {unaware / aware - 1.0:.1%} against {POLICIES[1]}")


def each_training_seed(
    problems: Sequence[Exercise], policy: Policy, seeds: int, out: dict[str, Any]
) -> None:
    """Measure the gain of learning separately for each training seed."""
    budget = Budget(seconds=SHORT_S[0])
    print(f"{budget}, each training seed of {policy.name} alone")
    initial = searched("initial weights", Portfolio(Initial()), problems, budget, seeds)
    print(initial.line())
    unlearnt = searched("without a policy", Portfolio(), problems, budget, seeds)
    print(unlearnt.line())
    alone = [replace(policy, others=()), *policy.others]
    own = [
        searched(f"seed {number}", Portfolio(member), problems, budget, seeds)
        for number, member in zip(training_seeds(policy), alone, strict=True)
    ]
    for each in own:
        print(f"{each.line()}   initial / this {initial.median() / each.median():.3f}")
    mean = float(np.exp(np.mean([np.log(each.median()) for each in own])))
    print(f"    initial / geometric mean of the seeds: {initial.median() / mean:.3f}")
    out |= {each.name: each.to_dict() for each in (initial, unlearnt, *own)}
    out["initial / geometric mean of the seeds"] = initial.median() / mean


def training_seeds(policy: Policy) -> list[int]:
    """Return the training seeds of a policy and of its others, in their order."""
    return [policy.card["seed"], *policy.card["others"]]


def on_unseen(of: Subjects, seeds: int, out: dict[str, Any]) -> None:
    """Repeat the comparisons on problems that were not used to choose anything."""
    of_policies(of.policies, of.unseen, seeds, out.setdefault("policies", {}))
    for seconds in SHORT_S:
        budget = Budget(seconds=seconds)
        at_budget(of.unseen, budget, of.policies, seeds, out.setdefault(f"{budget}", {}))
    policy = of.policies["synthetic-only"]
    each_training_seed(of.unseen, policy, seeds, out.setdefault("training-seeds", {}))


def heavy(of: Subjects, budget: Budget, seeds: int, out: dict[str, Any]) -> None:
    """Compare searches on problems with four times as much communication as computation."""
    problems = of.communicating
    print(f"communication-heavy, {budget}, {seeds} seeds")
    annealing = searched("annealing", placer_named("annealing"), problems, budget, seeds)
    print(annealing.line())
    out[annealing.name] = annealing.to_dict()
    if budget.seconds != LONG_S:
        more = searched("with the portfolio's moves", WITH_MOVES, problems, budget, seeds)
        print(more.line())
        out[more.name] = more.to_dict()
    for name, policy in of.policies.items():
        own = searched(f"portfolio with {name}", Portfolio(policy), problems, budget, seeds)
        print(own.line())
        out[own.name] = own.to_dict() | {"to annealing": compared(own, annealing, problems)}


def under_noise(
    problems: Sequence[Exercise], policy: Policy, seeds: int, out: dict[str, Any]
) -> None:
    """Measure how much of the gain over the best heuristic remains if costs and sizes are wrong."""
    found = sorted(_remains(problems, policy, seed) for seed in range(seeds))
    shares = [share for share, *_ in found]
    share, nominal, noisy = found[len(found) // 2]
    print(
        f"costs and sizes off by {NOISE:.0%}: {share:.0%} ({shares[0]:.0%} to {shares[-1]:.0%}) of "
        f"the gain over the best heuristic remains ({nominal:.3f} becomes {noisy:.3f})"
    )
    out |= {"shares": shares, "nominal": nominal, "noisy": noisy}


def _remains(problems: Sequence[Exercise], policy: Policy, seed: int) -> tuple[float, float, float]:
    """Return the remaining share of the gain, and the mean ratios with right and wrong costs."""
    nominal, noisy = [], []
    for item in problems:
        plans = [
            ranked(item.known)[0],
            Portfolio(policy).place(
                SearchRequest(item.judge.problem, Budget(seconds=1.0), seed=seed)
            )[0],
        ]
        nominal.append([plan.step_ns for plan in plans])
        draws = range(DRAWS * seed, DRAWS * (seed + 1))
        costs = [perturbed_costs(item.judge.problem, plans, draw) for draw in draws]
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
        edge_bytes=(graph.edge_bytes * byte_factor).round().astype(np.int64),
    )
    judge = Judge(Problem.of(changed, problem.cluster))
    devices = np.array([plan.devices for plan in plans])
    return judge.costs(devices, np.array([plan.priority for plan in plans]))


def on_planted(policy: Policy, seconds: float, seeds: int, out: dict[str, Any]) -> None:
    """Measure the gap to known optima."""
    out |= planted_gaps(Portfolio(policy), Budget(seconds=seconds), seeds)
    gaps = list(out.values())
    print(
        f"planted optima, {len(gaps)} problems, {seconds:g} s, {seeds} seeds: median gap "
        f"{np.median(gaps):.2%}, worst {np.max(gaps):.2%}"
    )


def large(policy: Policy, out: dict[str, Any]) -> None:
    """Run the portfolio on a large graph."""
    began = time.perf_counter()
    problem = Problem.of(flat_layered(LARGE_OPS, 64, seed=3), cluster_of(8))
    plans = Portfolio(policy).place(SearchRequest(problem, Budget(seconds=LARGE_S)))
    spent = time.perf_counter() - began
    [heft] = [plan for plan in plans if plan.kind is Kind.HEFT]
    ratio = plans[0].step_ns / heft.step_ns
    print(f"{LARGE_OPS:,} ops on 8 devices: {spent:.1f} s, {ratio:.4f} of HEFT ({plans[0].name})")
    out |= {"ops": LARGE_OPS, "spent_s": spent, "to HEFT": ratio}


def op_by_op(problems: Sequence[Exercise], policy: Policy, out: dict[str, Any]) -> None:
    """Run plain deep RL (MaskablePPO), trained within its budget on this problem alone."""
    smallest = min(problems, key=lambda item: item.judge.problem.op_count)
    problem = smallest.judge.problem
    plan = maskable_ppo(problem, Budget(seconds=MASKABLE_S), seed=0)
    best = Portfolio(policy).place(SearchRequest(problem, Budget(seconds=0.1)))[0]
    ratios = [smallest.ratio(each.step_ns) for each in (plan, best)]
    print(
        f"{smallest.family}, {problem.op_count} ops: MaskablePPO {ratios[0]:.3f} after "
        f"{MASKABLE_S:g} s, portfolio {ratios[1]:.3f} after 0.1 s"
    )
    out |= {"MaskablePPO": ratios[0], "portfolio": ratios[1]}


def main(record: Record, effort: Effort, names: Sequence[str] = ()) -> None:
    """Run all parts, or the named ones."""
    works = parts(effort)
    for name in names or works:
        record.part(f"search: {name}", works[name])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quick", action="store_true", help="one seed, no ten-second budgets")
    chosen.add_argument("--full", action="store_true", help="five seeds of ten-second budgets, too")
    parser.add_argument("--seeds", type=int, metavar="N", help="of short budgets (default: 5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go (JSON)")
    parser.add_argument(
        "names", nargs="*", metavar="PART", help=f"default: all of {', '.join(parts(Effort()))}"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(parts(FULL)):
        parser.error(f"there is no part {', '.join(unknown)}")
    wanted = QUICK if arguments.quick else FULL if arguments.full else Effort()
    if arguments.seeds:
        wanted = replace(wanted, seeds=arguments.seeds)
    main(Record(arguments.out, math.inf), wanted, arguments.names)
