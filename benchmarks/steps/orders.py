"""Rank correlation of predicted and measured steps, from random to good placements."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.steps.answers import Answer, Answers
from benchmarks.tables import Table
from envs.placement import Placement
from envs.simulator import INFEASIBLE_NS, Simulator

TRIED: Final = 400
ROUNDS: Final = 5


def order(answers: Answers, name: str, count: int, found: dict[str, Any]) -> Table:
    """Measure placements twice, and correlate the ranks of predictions and measurements."""
    answer = answers.of(name)
    placements, predicted_s = between_random_and_good(answer, count)
    once_s, again_s = (
        np.array([each.step_s for each in answer.measured(placements, predicted_s[0], ROUNDS)])
        for _ in range(2)
    )
    own = spearman(predicted_s, (once_s + again_s) / 2)
    repeated = spearman(once_s, again_s)
    found.update(predicted_s=predicted_s, once_s=once_s, again_s=again_s, spearman=own)
    return Table(
        "Order of placements",
        f"rank correlation of predicted and measured steps of {len(placements)} placements, from "
        "random to good and from even to uneven, evenly spaced in the logarithm of the predicted "
        "step; and of two measurements of them",
        ("model", "predicted ms", "predicted, measured", "measured twice"),
        (
            (
                name,
                f"{predicted_s.min() * 1e3:.0f} to {predicted_s.max() * 1e3:.0f}",
                f"{own:.3f}",
                f"{repeated:.3f}",
            ),
        ),
    )


def between_random_and_good(
    answer: Answer, count: int
) -> tuple[list[Placement], NDArray[np.float64]]:
    """Return placements evenly spaced in the logarithm of their predicted step, and these steps.

    Candidates are the fastest placement with a part of its groups of ops moved at random, to the
    first core with a probability that is drawn for each: what is spread evenly over both takes
    nearly the same time, wherever each op is.
    """
    problem, rng = answer.problem, np.random.default_rng(0)
    good, priority = answer.placed.placement.arrays()
    groups = np.where(
        problem.graph.group < 0, np.arange(len(good)) + len(good), problem.graph.group
    )
    _, group_of = np.unique(groups, return_inverse=True)
    size = group_of.max() + 1
    tried = np.tile(good, (TRIED, 1))
    for row, share in enumerate(np.linspace(0.0, 1.0, TRIED) ** 2):
        likely = rng.dirichlet(np.ones(problem.device_count))
        anywhere = rng.choice(problem.device_count, size=size, p=likely)[group_of]
        moved = (rng.random(size) < share)[group_of]
        tried[row] = np.where(moved, anywhere, good)
    step_ns = Simulator(problem).step_ns(tried, np.tile(priority, (TRIED, 1)))
    tried, step_ns = tried[step_ns < INFEASIBLE_NS], step_ns[step_ns < INFEASIBLE_NS]
    logs = np.log(step_ns)
    free = set(range(len(tried)))
    chosen = []
    for target in np.linspace(logs.min(), logs.max(), min(count, len(tried))):
        chosen.append(min(free, key=lambda row: abs(logs[row] - target)))
        free.remove(chosen[-1])
    placements = [
        Placement.of(problem.graph, problem.cluster, tried[row], priority) for row in chosen
    ]
    return placements, step_ns[chosen] / 1e9 + problem.graph.hand_over_s


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the rank correlation of two arrays without ties."""
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    count = len(a)
    return float(1 - 6 * np.square(ranks[0] - ranks[1]).sum() / (count * (count**2 - 1)))
