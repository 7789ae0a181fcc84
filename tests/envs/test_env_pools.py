"""Environments that draw problems from a pool: op by op, batched, and without end."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

from envs.placement_env import INVALID_REWARD, PlacementEnv
from placer.policies.pool import Clusters, Exercise, draw_pool
from placer.policies.scheduler_env import SchedulerBatch
from placer.search.list_scheduler.decoder import WEIGHT_COUNT

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
    check_env_of_sb3(ActionMasker(environment, lambda inner: inner.action_masks()))  # type: ignore[attr-defined]  # gym.Env has no masks


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_an_episode_with_allowed_actions_ends_with_the_ratio_of_a_placement(seed: int) -> None:
    pool = small_pool()
    environment = placement_env(pool)
    rng = np.random.default_rng(seed)
    item = pool[environment.reset(seed=seed)[1]["number"]]
    ended, reward = False, 0.0
    info: dict[str, Any] = {}
    while not ended:
        _, reward, ended, _, info = environment.step(masked_action(environment, rng))
    assert info["feasible"]
    assert reward > INVALID_REWARD
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


def test_a_given_problem_is_taken() -> None:
    environment = placement_env(small_pool(6))
    assert environment.reset(seed=0, options={"number": 4})[1] == {"number": 4}
    for number in (-1, 6, 7):
        with pytest.raises(ValueError, match=f"number is {number}: problems have .* 0 to 5"):
            environment.reset(options={"number": number})


@pytest.mark.parametrize("name", ["placer/Placement-v0", "placer/Scheduler-v0"])
def test_an_empty_pool_is_not_the_toy_problem(name: str) -> None:
    with pytest.raises(ValueError, match="the pool is empty: give at least one"):
        gym.make(name, pool=[])


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_actions_are_enough_for_all_devices(most: int) -> None:
    with pytest.raises(ValueError, match=f"most_devices is {most}, but a problem has 4 devices"):
        placement_env(small_pool(6), most)


def test_a_batch_that_was_put_away_goes_on_as_if_nothing_had_happened() -> None:
    pool, rng = small_pool(), np.random.default_rng(0)

    def actions() -> NDArray[np.float32]:
        return rng.uniform(-1, 1, (3, WEIGHT_COUNT)).astype(np.float32)

    first: Any = SchedulerBatch(pool, 3, 1)
    second: Any = SchedulerBatch(pool, 3, 2)
    seen = first.reset()
    for _ in range(50):
        seen = first.step(actions())[0]
    assert (second.restore(json.loads(json.dumps(first.state()))) == seen).all()
    for _ in range(100):
        chosen = actions()
        for one, other in zip(first.step(chosen)[:3], second.step(chosen)[:3], strict=True):
            assert (one == other).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["placer/Placement-v0", "placer/Scheduler-v0"])
def test_random_actions_never_break_an_environment(name: str) -> None:
    pool: list[Any] = small_pool(12)
    if name == "placer/Placement-v0":
        pool = [item.evaluator.problem for item in pool]
    environment: Any = gym.make(name, pool=pool).unwrapped
    environment.action_space.seed(0)
    observation, _ = environment.reset(seed=0)
    for _ in range(ROLLOUT_STEPS):
        assert environment.observation_space.contains(observation)
        observation, reward, ended, _, _ = environment.step(environment.action_space.sample())
        assert np.isfinite(reward)
        if ended:
            observation, _ = environment.reset()
