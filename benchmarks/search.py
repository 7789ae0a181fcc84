"""How good are plans after equal time: heuristics, the learned policy, search, plain deep RL.

    python -m benchmarks.search

Graphs that the shipped policy never saw, of all families. Numbers are step times relative to the
best of {single device, HEFT, ETF}, geometric means with the range over the search seeds; smaller is
better. MaskablePPO places op by op and learns from nothing within its budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placer.policies import Policy, load
from placer.policies.maskable import maskable_ppo
from placer.policies.pool import Exercise, draw_pool
from placer.policies.training import baselines, scores
from placer.search.budget import Budget
from placer.search.portfolio import load_compiled_code, search

GRAPHS = 14
LARGEST_OPS = 600
DRAWN_FROM = 991  # a seed that training does not use
SEEDS = (0, 1, 2)
BUDGETS_S = (0.1, 1.0)
MASKABLE_S = 10.0


def main() -> None:
    load_compiled_code()
    pool = draw_pool(DRAWN_FROM, GRAPHS, LARGEST_OPS)
    policy = load("generalist")
    sizes = [item.judge.problem.op_count for item in pool]
    print(f"{len(pool)} graphs of {min(sizes)} to {max(sizes)} ops")
    for name, value in baselines(pool).items():
        line(name, [value])
    alone, sampled = scores(policy, pool)
    line("policy, one decode", [geometric_mean(alone)])
    line("policy, best of 16", [geometric_mean(sampled)])
    for seconds in BUDGETS_S:
        line(f"search, untrained, {seconds:g} s", over_seeds(pool, seconds, None))
        line(f"search with policy, {seconds:g} s", over_seeds(pool, seconds, policy))
    smallest = pool[int(np.argmin(sizes))]
    problem = smallest.judge.problem
    found = maskable_ppo(problem, Budget(seconds=MASKABLE_S), seed=0)
    [best] = over_seeds([smallest], 0.1, policy)[:1]
    print(f"the smallest, {problem.op_count} ops ({smallest.family}):")
    line(f"MaskablePPO, {MASKABLE_S:g} s", [smallest.ratio(found.step_ns)])
    line("search with policy, 0.1 s", [best])


def over_seeds(pool: list[Exercise], seconds: float, policy: Policy | None) -> list[float]:
    means = []
    for seed in SEEDS:
        steps = [
            search(item.judge.problem, Budget(seconds=seconds), seed, policy)[0].step_ns
            for item in pool
        ]
        ratios = [item.ratio(step) for item, step in zip(pool, steps, strict=True)]
        means.append(geometric_mean(np.array(ratios)))
    return means


def geometric_mean(ratios: NDArray[np.float64]) -> float:
    return float(np.exp(np.log(ratios).mean()))


def line(name: str, values: list[float]) -> None:
    ordered = sorted(values)
    spread = f"   ({ordered[0]:.3f} to {ordered[-1]:.3f})" if len(values) > 1 else ""
    print(f"  {name:32} {ordered[len(ordered) // 2]:.3f}{spread}")


if __name__ == "__main__":
    main()
