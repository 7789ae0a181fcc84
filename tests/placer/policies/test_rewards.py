"""Rewards of decodes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from placer.policies.pool import CANNOT_RUN, draw_pool
from placer.policies.rewards import (
    FARTHEST_REWARD,
    SMALLEST_SPREAD,
    TOGETHER,
    UNTRAINED_SAMPLES,
    WORST_REWARD,
    Rewards,
    added_to_best,
    plain_rewards,
    relative_rewards,
)
from placer.policies.training.run import RATIOS, most_helpful
from placer.search.list_scheduler.decoder import HEFT


class Steps:
    """Evaluator with costs that alternate around a level for each problem."""

    levels = np.array([1000.0, 1000.0, 50.0])
    spreads = np.array([0.5, 0.001, 0.1])

    def __init__(self) -> None:
        self.weights: list[NDArray[np.floating[Any]]] = []

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        self.weights.append(weights)
        sign = 1.0 - 2.0 * (np.arange(len(numbers)) % 2)
        steps = 1e9 * self.levels[numbers] * np.exp(self.spreads[numbers] * sign)
        return np.asarray(steps.round(), np.int64)

    def close(self) -> None:
        """Do nothing."""


def test_a_plain_reward_is_ten_times_the_logarithm_of_the_gain() -> None:
    rewards = plain_rewards(3)
    found = rewards.of(np.array([0, 1, 2]), np.array([1.0, 0.5, 1e9]))
    assert found.tolist() == pytest.approx([0.0, 10 * np.log(2), WORST_REWARD], rel=1e-6)


@pytest.mark.parametrize("ratio", [np.nan, np.inf, -np.inf, 0.0, -1.0])
def test_a_ratio_that_is_no_number_is_worth_the_least(ratio: float) -> None:
    for rewards, least in ((plain_rewards(2), WORST_REWARD), (alternating(), -FARTHEST_REWARD)):
        found = rewards.of(np.array([0, 1]), np.array([ratio, 1.0]))
        assert found[0] == least
        assert np.isfinite(found).all()


def alternating() -> Rewards:
    return relative_rewards(Steps(), np.array([10**12, 5 * 10**11, 10**11]), 0.2)


def test_a_relative_reward_is_measured_by_what_untrained_weights_do_on_that_problem() -> None:
    steps = Steps()
    rewards = relative_rewards(steps, np.array([10**12, 5 * 10**11, 10**11]), 0.2)
    # Logarithms of cost / reference: 0, log 2 and log 0.5 on average.
    assert rewards.expected == pytest.approx([0.0, np.log(2), np.log(0.5)], abs=1e-6)
    assert rewards.spread == pytest.approx([0.5, SMALLEST_SPREAD, 0.1], abs=1e-6)
    found = rewards.of(np.array([0, 0, 2, 1]), np.array([1.0, np.exp(-0.5), 0.5 * np.e**0.2, 1e9]))
    assert found.tolist() == pytest.approx([0.0, 1.0, -2.0, -FARTHEST_REWARD], abs=1e-4)
    assert len(np.concatenate(steps.weights)) == 3 * UNTRAINED_SAMPLES


def test_decodes_that_cannot_run_do_not_change_what_others_earn() -> None:
    class SomeFail(Steps):
        def costs(self, numbers: NDArray[np.int64], weights: NDArray[Any]) -> NDArray[np.int64]:
            costs = super().costs(numbers, weights)
            fails = (np.arange(len(costs)) % 4 == 0) | (numbers == 1)
            return np.where(fails, 10**17, costs)

    rewards = relative_rewards(SomeFail(), np.array([10**12, 5 * 10**11, 10**11]), 0.2)
    plain = alternating()
    assert np.abs(rewards.expected[[0, 2]] - plain.expected[[0, 2]]).max() < 0.2
    assert (rewards.spread[[0, 2]] <= plain.spread[[0, 2]]).all()
    found = rewards.of(np.array([0, 1, 1]), np.array([CANNOT_RUN, CANNOT_RUN, 1.0]))
    assert found.tolist() == [-FARTHEST_REWARD, -FARTHEST_REWARD, 0.0]


@pytest.mark.parametrize("k", range(2, 7))
def test_samples_earn_what_they_add_to_the_best_of_some(k: int) -> None:
    rewards = np.random.default_rng(k).normal(size=(3, 6)).round(1).astype(np.float32)
    rewards[0, 3] = rewards[0].max()
    found = added_to_best(rewards, k)
    for own, added in zip(rewards, found, strict=True):
        for i, reward in enumerate(own):
            others = combinations(np.delete(own, i), k - 1)
            expected = np.mean([max(reward - max(some), 0.0) for some in others])
            assert added[i] == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_what_samples_add_is_that_of_the_expected_best() -> None:
    # Rewards are a normal variable around a mean m, so d E[best of 4] / dm is 1.
    noise = np.random.default_rng(0).normal(size=(40_000, TOGETHER))
    gradient = added_to_best(noise, 4) * noise  # times d log p / dm
    assert 4 * gradient.mean() == pytest.approx(1.0, abs=0.02)


def test_untrained_weights_earn_nothing_on_average() -> None:
    from placer.policies.decoders import InProcess

    pool = draw_pool(3, 6, 100)
    here = InProcess([item.evaluator for item in pool])
    references = np.array([item.reference_ns for item in pool])
    rewards = relative_rewards(here, references, 0.2)
    again = relative_rewards(here, references, 0.2)
    assert (rewards.expected == again.expected).all()
    numbers = np.repeat(np.arange(6), 50)
    weights = HEFT + 0.4 * np.random.default_rng(0).normal(size=(300, len(HEFT)))
    ratios = here.costs(numbers, weights) / references[numbers]
    earned = rewards.of(numbers, ratios).reshape(6, 50).mean(axis=1)
    assert np.abs(earned).max() < 0.8


def test_seeds_are_kept_that_add_most_to_the_best() -> None:
    def row(total: float, ratios: list[float]) -> dict[str, Any]:
        return {"validation": {"mean": total, "best_of_16": 0.0}, RATIOS: ratios}

    rows = [
        row(0.9, [0.9, 0.9, 0.8]),
        row(0.8, [0.8, 0.8, 0.8]),  # the best
        row(0.85, [0.8, 0.8, 0.79]),
        row(2.0, [0.4, 3.0, 3.0]),  # bad on average, but complementary
    ]
    assert most_helpful(rows, 1) == [1]
    assert most_helpful(rows, 3) == [1, 3, 2]
    assert most_helpful(rows, 9) == [1, 3, 2, 0]
