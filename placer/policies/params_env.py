"""Choice of decoder weights as a one-step environment, and as a VecEnv for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from envs.toy_problem import toy_problem
from placer.policies.decoders import Decoders, Here
from placer.policies.network import ACTION_SCALE, FARTHEST, normalised
from placer.policies.pool import Exercise, exercise
from placer.policies.rewards import Rewards, plain_rewards
from placer.policies.summary import FEATURES
from placer.search.decoder import HEFT, WEIGHT_COUNT


class PlacementParamsEnv(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Choose the weights of the list scheduler for a problem; an episode has one step.

    Observation: (F,) float32 in -2 .. 2: the summary of a problem drawn from the pool, normalised
                 by the pool's mean and standard deviation.
    Action:      (K,) float32 in -1 .. 1; weights = HEFT + 2 * action.
    Reward:      -10 log(step / reference), the reference being the best of single device, HEFT and
                 ETF; not below -20. Higher is better, 0 equals the best heuristic.
    Info:        ``step_ns``, ``reference_ns`` and ``family``.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium

    def __init__(self, pool: Sequence[Exercise] | None = None) -> None:
        """Draw problems from ``pool``, by default from one small problem."""
        self.pool = list(pool or [exercise(toy_problem(), "two-towers")])
        self.feature_mean, self.feature_deviation = pool_scale(self.pool)
        self.observation_space = observation_space()
        self.action_space = action_space()
        self._current = self.pool[0]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draw a problem."""
        super().reset(seed=seed)
        self._current = self.pool[int(self.np_random.integers(len(self.pool)))]
        return self._observe(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Decode the weights; the episode ends."""
        cost = decoded_cost(self._current, action)
        info = {
            "step_ns": cost,
            "reference_ns": self._current.reference_ns,
            "family": self._current.family,
        }
        return self._observe(), reward_of(self._current, cost), True, False, info

    def _observe(self) -> NDArray[np.float32]:
        return normalised(self._current.summary, self.feature_mean, self.feature_deviation)


class ParamsBatch(VecEnv):
    """VecEnv of :class:`PlacementParamsEnv`; problems differ from episode to episode.

    The info of every step has the ``ratio`` of the cost to the reference.
    """

    def __init__(
        self,
        pool: Sequence[Exercise],
        count: int,
        seed: int,
        decoders: Decoders | None = None,
        scale: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        rewards: Rewards | None = None,
    ) -> None:
        """Create ``count`` environments that draw from one pool; ``decoders`` hold its problems.

        Observations are in units of ``scale``, by default the pool's own. ``rewards`` default to
        those of the plain environment.
        """
        super().__init__(count, observation_space(), action_space())
        self.pool = list(pool)
        self.decoders = decoders or Here([item.judge for item in self.pool])
        self.rewards = rewards or plain_rewards(len(self.pool))
        self.chosen = np.arange(len(self.pool))
        self._random = np.random.default_rng(seed)
        mean, deviation = scale or pool_scale(self.pool)
        self._observations = np.stack(
            [normalised(item.summary, mean, deviation) for item in self.pool]
        )
        self._current = np.zeros(count, np.int64)
        self._actions = np.zeros((count, WEIGHT_COUNT), np.float32)

    def reset(self) -> NDArray[np.float32]:
        """Draw problems; return their observations (count, F)."""
        self._current = self.chosen[self._random.integers(len(self.chosen), size=self.num_envs)]
        return self._observations[self._current]

    def step_async(self, actions: NDArray[np.float32]) -> None:
        """Store the actions (count, K)."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Decode all actions, and draw the next problems."""
        costs = self.decoders.costs(self._current, weights_of(self._actions))
        items = [self.pool[number] for number in self._current]
        ratios = [
            item.ratio(max(cost, 1)) for item, cost in zip(items, costs.tolist(), strict=True)
        ]
        rewards = self.rewards.of(self._current, np.array(ratios))
        infos: list[dict[str, Any]] = [
            {"terminal_observation": self._observations[number], "ratio": ratio}
            for number, ratio in zip(self._current, ratios, strict=True)
        ]
        return self.reset(), rewards, np.ones(self.num_envs, np.bool_), infos

    def observations(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return observations (B, F) of the problems ``numbers`` (B,)."""
        return self._observations[numbers]

    def choose(self, numbers: NDArray[np.int64]) -> None:
        """Restrict drawing to the problems ``numbers`` of the pool from now on."""
        self.chosen = numbers

    def state(self) -> dict[str, Any]:
        """Return the random state and the current problems, JSON compatible."""
        return {"random": self._random.bit_generator.state, "current": self._current.tolist()}

    def restore(self, state: Mapping[str, Any]) -> NDArray[np.float32]:
        """Continue from :meth:`state`; return the last observations (count, F)."""
        self._random.bit_generator.state = state["random"]
        self._current = np.array(state["current"], np.int64)
        return self._observations[self._current]

    def close(self) -> None:
        """Do nothing."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute, once for each of the environments."""
        return [getattr(self, attr_name, None) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the batch, which all environments share."""
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method, once for each of the environments."""
        method = getattr(self, method_name)
        return [method(*method_args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return False for each of the environments."""
        return [False for _ in self._get_indices(indices)]


def observation_space() -> gym.Space[NDArray[np.float32]]:
    """Return the space of normalised summaries (F,)."""
    return spaces.Box(-FARTHEST, FARTHEST, (len(FEATURES),), np.float32)


def action_space() -> gym.Space[NDArray[np.float32]]:
    """Return the space of offsets from HEFT (K,), in units of ACTION_SCALE."""
    return spaces.Box(-1.0, 1.0, (WEIGHT_COUNT,), np.float32)


def pool_scale(pool: Sequence[Exercise]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and standard deviation (F,) of the summaries of a pool; 1 if all are equal."""
    summaries = np.stack([item.summary for item in pool])
    deviation = summaries.std(axis=0)
    return (
        summaries.mean(axis=0).astype(np.float32),
        np.where(deviation > 1e-6, deviation, 1.0).astype(np.float32),
    )


def decoded_cost(item: Exercise, action: NDArray[np.float32]) -> int:
    """Return the cost of a decoded action (K,)."""
    return int(item.judge.decoded(weights_of(action[None]))[2][0])


def weights_of(actions: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return decoder weights (B, K) of actions (B, K)."""
    return np.asarray(HEFT + ACTION_SCALE * np.clip(actions.astype(np.float64), -1.0, 1.0))


def reward_of(item: Exercise, cost: int) -> float:
    """Return the plain reward of a cost, in WORST_REWARD .. infinity."""
    ratio = np.array([item.ratio(max(cost, 1))])
    return float(plain_rewards(1).of(np.zeros(1, np.int64), ratio)[0])
