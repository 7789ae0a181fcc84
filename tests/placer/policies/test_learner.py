"""A learner: it trains PPO's network and returns an average of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from placer.policies import load
from placer.policies.pool import draw_pool, exercise
from placer.policies.scheduler_env import SchedulerBatch
from placer.policies.training.learner import Learner, exported, imported
from tests.helpers.random_problems import random_problem
from tests.helpers.tiny_training import TINY


def learner(average_rollouts: int) -> Learner:
    config = replace(TINY, ppo=replace(TINY.ppo, average_rollouts=average_rollouts))
    return Learner(config, 0, SchedulerBatch(draw_pool(5, 2, 80), 4, 0))


@pytest.mark.parametrize("rollouts", [1, 4])
def test_a_policy_is_the_exponential_average_of_the_network_after_each_rollout(
    rollouts: int,
) -> None:
    learning = learner(rollouts)
    expected: dict[str, torch.Tensor] = {}
    for _ in range(5):
        learning.rollout()
        for key, value in learning.model.policy.state_dict().items():
            before = expected.get(key, value)
            expected[key] = before + (value - before) / rollouts
    network = learning.model.policy.state_dict()
    for key, value in learning.policy.state_dict().items():
        torch.testing.assert_close(value, expected[key])
        if key == "action_net.weight":
            assert bool((value == network[key]).all()) is (rollouts == 1)


def test_averaging_does_not_change_what_is_learnt() -> None:
    networks = []
    for average_rollouts in (1, 7):
        learning = learner(average_rollouts)
        for _ in range(3):
            learning.rollout()
        networks.append(learning.model.policy.state_dict())
    for key, value in networks[0].items():
        assert (value == networks[1][key]).all()


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_training_that_diverges_ends(weight: float) -> None:
    learning = learner(1)
    with torch.no_grad():
        learning.model.policy.get_parameter("action_net.weight").fill_(weight)
    with pytest.raises(FloatingPointError, match=r"diverged after \d+ decodes"):
        learning.rollout()


def test_a_training_whose_deviations_leave_their_range_ends() -> None:
    learning = learner(1)
    with torch.no_grad():
        learning.model.policy.log_std.fill_(4.0)
    with pytest.raises(FloatingPointError, match=r"deviations .* lower ppo\.entropy"):
        learning.rollout()


def test_a_network_that_begins_with_a_policy_proposes_the_same_weights() -> None:
    policy = load("generalist")
    item = exercise(random_problem(2, ops=30, devices=3))
    scale = (policy.feature_mean, policy.feature_deviation)
    layers = tuple(len(bias) for _, bias in policy.layers[:-1])
    config = replace(TINY, ppo=replace(TINY.ppo, layers=layers))
    learning = Learner(config, 0, SchedulerBatch([item], 4, 0, scale=scale))
    imported(learning.model.policy, policy)
    ours = exported(learning.model.policy, "", *scale).weights(item.summary)
    for one, other in zip(ours, policy.weights(item.summary), strict=True):
        assert (one == other).all()
    with pytest.raises(ValueError, match=r"needs ppo.layers = \[16\]"):
        imported(learner(1).model.policy, policy)
