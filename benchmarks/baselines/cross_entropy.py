"""Cross-entropy method: learns device probabilities of the groups of one graph.

De Boer, Kroese, Mannor and Rubinstein, "A Tutorial on the Cross-Entropy Method" (2005), section 4:
draw placements, keep the elite, and move the probabilities, with smoothing, towards the frequency
of each device in the elite. Ready ops run by upward rank.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.groups import affordable, at_most, costs_of
from placer.search.sampling import BudgetedEvaluator, Sampling

MOST_GROUPS: Final = 64
SAMPLES: Final = 100
ELITE: Final = 0.1
SMOOTHING: Final = 0.7
SETTLED: Final = 0.99
"""The method restarts once every group has a device with a probability above this."""


class CrossEntropy(Sampling):
    """Samples placements of at most ``MOST_GROUPS`` groups until the budget is spent."""

    name: ClassVar[str] = "cross-entropy"

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        groups = at_most(budgeted.evaluator.problem, MOST_GROUPS)
        random = np.random.default_rng(seed)
        even = groups.allowed / groups.allowed.sum(axis=1, keepdims=True)
        probability = even
        while not budgeted.over():
            drawn = draw(probability, affordable(budgeted, SAMPLES), random)
            costs = costs_of(budgeted, groups.expand(drawn))
            if len(costs) < SAMPLES:
                break
            if groups.allowed.sum(axis=1).max() == 1:
                break  # nothing to choose
            probability = moved(probability, drawn, costs)
            if probability.max(axis=1).min() > SETTLED:
                probability = even


def draw(
    probability: NDArray[np.float64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return devices (count, G), drawn with probabilities (G, D), never one of probability 0."""
    borders = probability.cumsum(axis=1)
    borders /= borders[:, -1:]
    chance = random.random((count, len(probability), 1))
    return np.asarray((chance >= borders[None]).sum(axis=2), np.int64)


def moved(
    probability: NDArray[np.float64], drawn: NDArray[np.int64], costs: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return updated probabilities (G, D) from samples (B, G) with costs (B,)."""
    elite = drawn[np.argsort(costs, kind="stable")[: max(int(ELITE * len(costs)), 1)]]
    chosen = (elite[:, :, None] == np.arange(probability.shape[1])).mean(axis=0)
    return np.asarray(SMOOTHING * chosen + (1.0 - SMOOTHING) * probability)
