"""Environments that draw problems from a pool: op by op, batched, and without end."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

from envs.placement_env import INVALID_REWARD, PlacementEnv
from placer.policies.pool import Clusters, Exercise, draw_pool
from placer.policies.scheduler_env import SchedulerBatch
from placer.policies.training.tasks import PlacementBatch, ratio_of

torch.set_num_threads(1)

ROLLOUT_STEPS = 100_000


def small_pool(count: int = 3) -> list[Exercise]:
    return draw_pool(5, count, 80, ["layered", "grid"], Clusters(devices=(2, 3, 4)))


def placement_env(pool: list[Exercise], most_devices: int | None = None) -> PlacementEnv:
    return PlacementEnv(pool=[item.evaluator.problem for item in pool], most_devices=most_devices)


def masked_action(environment: PlacementEnv, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(environment.action_masks())))


def test_checkers_pass_with_problems_of_unequal_numbers_of_devices() -> None:
    environment = placement_env(small_pool(6), 6)
    check_env(environment, skip_render_check=True)
    check_env_of_sb3(environment)


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_an_episode_with_allowed_actions_ends_with_the_ratio_of_a_placement(seed: int) -> None:
    pool = small_pool()
    environment = placement_env(pool)
    rng = np.random.default_rng(seed)
    environment.reset(seed=seed)
    item = pool[environment.state()["number"]]
    ended, reward = False, 0.0
    info: dict[str, Any] = {}
    while not ended:
        _, reward, ended, _, info = environment.step(masked_action(environment, rng))
    assert info["feasible"]
    assert reward > INVALID_REWARD
    assert ratio_of(pool, info) == pytest.approx(info["step_s"] * 1e9 / item.reference_ns)
    devices, priority = info["placement"].arrays()
    assert item.evaluator.costs(devices[None], priority[None])[0] == round(info["step_s"] * 1e9)


def test_devices_that_a_problem_lacks_are_masked_and_end_the_episode() -> None:
    environment = placement_env(small_pool(), 8)
    observation, _ = environment.reset(seed=0)
    count = environment.problem.device_count
    assert not environment.action_masks()[count:].any()
    assert (observation[8 + 8 * count :] == 0.0).all()
    _, reward, ended, _, info = environment.step(7)
    assert (reward, ended) == (INVALID_REWARD, True)
    assert not info["feasible"]


def test_a_given_problem_is_taken_and_chosen_ones_are_drawn() -> None:
    environment = placement_env(small_pool(6))
    environment.reset(seed=0, options={"number": 4})
    assert environment.state()["number"] == 4
    environment.chosen = np.array([1, 2])
    drawn = set()
    for _ in range(20):
        environment.reset()
        drawn.add(environment.state()["number"])
    assert drawn == {1, 2}


@pytest.mark.parametrize("kind", ["weights", "op by op"])
def test_a_batch_that_was_put_away_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    pool = small_pool()

    def batch(seed: int) -> Any:
        made = SchedulerBatch(pool, 3, seed) if kind == "weights" else PlacementBatch(pool, 3, 4)
        made.seed(seed)
        return made

    def actions(rng: np.random.Generator) -> Any:
        if kind == "weights":
            return rng.uniform(-1, 1, (3, *first.action_space.shape)).astype(np.float32)
        masks = first.env_method("action_masks")
        return np.array([rng.choice(np.flatnonzero(mask)) for mask in masks])

    first, rng = batch(1), np.random.default_rng(0)
    seen = first.reset()
    for _ in range(50):
        seen = first.step(actions(rng))[0]
    second = batch(2)
    assert (second.restore(json.loads(json.dumps(first.state()))) == seen).all()
    for _ in range(100):
        chosen = actions(rng)
        ours, theirs = first.step(chosen), second.step(chosen)
        for one, other in zip(ours[:3], theirs[:3], strict=True):
            assert (one == other).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("placer/Placement-v0", True),
        ("placer/Placement-v0", False),
        ("placer/Scheduler-v0", False),
    ],
)
def test_random_actions_never_break_an_environment(name: str, masked: bool) -> None:
    pool: list[Any] = small_pool(12)
    if name == "placer/Placement-v0":
        pool = [item.evaluator.problem for item in pool]
    environment: Any = gym.make(name, pool=pool).unwrapped
    environment.action_space.seed(0)
    masks = environment.action_masks if masked else None
    observation, _ = environment.reset(seed=0)
    for _ in range(ROLLOUT_STEPS):
        assert environment.observation_space.contains(observation)
        mask = None if masks is None else masks().astype(np.int8)
        action = environment.action_space.sample(**({} if mask is None else {"mask": mask}))
        observation, reward, ended, _, _ = environment.step(action)
        assert np.isfinite(reward)
        if ended:
            observation, _ = environment.reset()
