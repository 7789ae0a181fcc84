"""Cross-entropy method: device probabilities of groups that move towards the best samples.

De Boer, Kroese, Mannor and Rubinstein, "A Tutorial on the Cross-Entropy Method" (2005), section 4:
draw placements, keep the elite, and move the probabilities, with smoothing, towards the frequency
of each device in the elite. Ready ops run by upward rank.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from placer.search.grouping import at_most
from placer.search.tally import Tally

MOST_GROUPS: Final = 64
POPULATION: Final = 100
ELITE: Final = 0.1
SMOOTHING: Final = 0.7
SETTLED: Final = 0.99
"""The method restarts once every group has a device with a probability above this."""


def cross_entropy(tally: Tally, seed: int) -> None:
    """Sample placements until the budget of the tally is spent; the tally keeps the best."""
    groups = at_most(tally.judge.problem, MOST_GROUPS)
    random = np.random.default_rng(seed)
    even = groups.allowed / groups.allowed.sum(axis=1, keepdims=True)
    priority = tally.judge.outline.bottom_level
    probability = even
    while not tally.over():
        drawn = draw(probability, tally.room(POPULATION), random)
        plans = groups.expand(drawn)
        costs = tally.all_judged(plans, np.broadcast_to(priority, plans.shape))
        if len(costs) < POPULATION:
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
