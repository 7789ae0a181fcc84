"""Rewards of decoded weights: how much shorter the step is than expected for its problem.

A reward is ``(expected - log(cost / reference)) / spread``, clipped at both ends. Plain rewards
expect the reference of every problem, the best of {single device, HEFT, ETF}. Relative rewards
expect the average of untrained weights around HEFT, in units of their standard deviation, so that
problems with much to gain do not dominate the others, and none is hopeless.

Search keeps the best of several decodes. To train for that, samples of one problem can be rewarded
by what they add to the best of k: :func:`added_to_best`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placer.policies.decoders import Decoders
from placer.policies.network import ACTION_SCALE
from placer.policies.pool import CANNOT_RUN
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT

REWARD_SCALE: Final = 10.0
WORST_REWARD: Final = -20.0
"""Reward of infeasible placements, and of those that take more than seven times the reference."""
UNTRAINED_SAMPLES: Final = 32
FARTHEST_REWARD: Final = 5.0
SMALLEST_SPREAD: Final = 0.01
"""Weights that change a step by less than this teach nothing."""
SEED: Final = 5_000_000
TOGETHER: Final = 16
"""Samples of one problem that are rewarded by what they add to the best of some."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewards:
    """Rewards of G problems; ``expected`` and ``spread`` are logarithms of cost / reference."""

    expected: NDArray[np.float64]  # (G,)
    spread: NDArray[np.float64]  # (G,)
    least: float
    most: float

    def of(self, numbers: NDArray[np.int64], ratios: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return rewards (B,) of costs over references (B,) on the problems ``numbers`` (B,).

        A ratio that is no finite number above 0, or that of a step that cannot run, is worth
        ``least``.
        """
        known = (ratios > 0.0) & (ratios < CANNOT_RUN)
        gain = self.expected[numbers] - np.log(np.where(known, ratios, 1.0))
        cut = np.clip(gain / self.spread[numbers], self.least, self.most)
        return np.asarray(np.where(known, cut, self.least), np.float32)


def added_to_best(rewards: NDArray[np.floating], k: int) -> NDArray[np.float32]:
    """Return what each of the samples (G, n) of a problem adds to the best of k, on average.

    That is ``max(reward - best of k - 1 others, 0)``, averaged over all choices of the others. Its
    policy gradient is that of the expected best of k, since the best of the others is a baseline.
    """
    count = rewards.shape[1]
    order = np.argsort(rewards, axis=1, kind="stable")
    ascending = np.take_along_axis(rewards, order, axis=1).astype(np.float64)
    # The j-th smallest is the best of the others if they are among the j smallest.
    choices = math.comb(count - 1, k - 1)
    chance = np.array([math.comb(j, k - 2) for j in range(count)]) / choices
    below, total = np.cumsum(chance), np.cumsum(chance * ascending, axis=1)
    added = np.empty_like(ascending)
    np.put_along_axis(added, order, below * ascending - total, axis=1)
    return np.asarray(added, np.float32)


def plain_rewards(count: int) -> Rewards:
    """Return -10 log(cost / reference), not below WORST_REWARD, for all of ``count`` problems."""
    return Rewards(
        expected=np.zeros(count),
        spread=np.full(count, 1.0 / REWARD_SCALE),
        least=WORST_REWARD,
        most=np.inf,
    )


def relative_rewards(
    decoders: Decoders, references: NDArray[np.int64], deviation: float
) -> Rewards:
    """Return rewards relative to 32 untrained decodes of every problem that ``decoders`` hold.

    ``references`` (G,) are costs of the best heuristics, ``deviation`` that of untrained actions.
    Decodes that cannot run do not count.
    """
    count = len(references)
    rng = np.random.default_rng(SEED)
    normal = rng.standard_normal((count, UNTRAINED_SAMPLES, WEIGHT_COUNT))
    weights = (HEFT + ACTION_SCALE * deviation * normal).reshape(-1, WEIGHT_COUNT)
    costs = decoders.costs(np.repeat(np.arange(count), UNTRAINED_SAMPLES), weights)
    ratios = np.maximum(costs, 1).reshape(count, -1) / references[:, None]
    logs = [np.log(own[own < CANNOT_RUN]) for own in ratios]
    return Rewards(
        expected=np.array([own.mean() if len(own) else 0.0 for own in logs]),
        spread=np.array([max(own.std(), SMALLEST_SPREAD) if len(own) else 1.0 for own in logs]),
        least=-FARTHEST_REWARD,
        most=FARTHEST_REWARD,
    )
