"""Op-by-op placement of problems that change between episodes, as an environment and a VecEnv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv

from envs.placement_env import DEVICE_FEATURES, LARGEST_FEATURE, OP_FEATURES, PlacementEnv
from envs.toy_problem import toy_problem
from placer.policies.pool import Exercise, exercise


class GeneratedPlacementEnv(gym.Env[NDArray[np.float32], np.int64]):
    """Assign one op to a device per step, as placer/Placement-v0, for problems drawn from a pool.

    Observation: (8 + 8 M,) float32: that of the problem's own environment, then zeros for the
                 devices it lacks of M, by default the largest number in the pool.
    Action:      index of a device, M of them; ``action_masks()`` (M,) bool.
    Reward:      as in placer/Placement-v0; higher is better.
    Info:        as in placer/Placement-v0, and in the last step, if the placement is feasible,
                 ``ratio``: step time / best of single device, HEFT and ETF.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium

    def __init__(self, pool: Sequence[Exercise] | None = None, devices: int | None = None) -> None:
        """Draw from ``pool``, by default one small problem, with at most ``devices`` devices."""
        self.pool = list(pool or [exercise(toy_problem(), "two-towers")])
        self.chosen = np.arange(len(self.pool))
        self.devices = devices or max(item.judge.problem.device_count for item in self.pool)
        shape = (len(OP_FEATURES) + self.devices * len(DEVICE_FEATURES),)
        self.observation_space = spaces.Box(0.0, LARGEST_FEATURE, shape, np.float32)
        self.action_space = spaces.Discrete(self.devices)
        self._made: dict[int, PlacementEnv] = {}
        self._actions: list[int] = []
        self._begin(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draw a problem, or take number ``options["number"]`` of the pool."""
        super().reset(seed=seed)
        given = (options or {}).get("number")
        drawn = self.chosen[int(self.np_random.integers(len(self.chosen)))]
        return self._begin(int(drawn if given is None else given)), {}

    def step(
        self, action: np.int64 | int
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Put the current op and its group on device ``action``."""
        self._actions.append(int(action))
        observation, reward, ended, cut, info = self._inner.step(action)
        if info.get("feasible"):
            info = {**info, "ratio": self.pool[self._number].ratio(round(info["step_s"] * 1e9))}
        return self._padded(observation), reward, ended, cut, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which devices are valid, (M,)."""
        mask = self._inner.action_masks()
        return np.concatenate([mask, np.zeros(self.devices - len(mask), np.bool_)])

    def state(self) -> dict[str, Any]:
        """Return the running episode and the random state, JSON compatible."""
        random = self.np_random.bit_generator.state
        return {"number": self._number, "actions": list(self._actions), "random": random}

    def restore(self, state: Mapping[str, Any]) -> NDArray[np.float32]:
        """Continue from :meth:`state`; return the last observation."""
        self.np_random.bit_generator.state = state["random"]
        observation = self._begin(int(state["number"]))
        for action in state["actions"]:
            observation = self.step(int(action))[0]
        return observation

    def _begin(self, number: int) -> NDArray[np.float32]:
        if number not in self._made:
            self._made[number] = PlacementEnv(self.pool[number].judge.problem)
        self._number, self._inner = number, self._made[number]
        self._actions.clear()
        return self._padded(self._inner.reset()[0])

    def _padded(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        shape = self.observation_space.shape or ()
        padded = np.zeros(shape, np.float32)
        padded[: len(observation)] = observation
        return padded


class GeneratedBatch(DummyVecEnv):
    """VecEnv of :class:`GeneratedPlacementEnv` in one thread."""

    envs: list[GeneratedPlacementEnv]  # type: ignore[assignment]  # narrower than the base's

    def __init__(self, pool: Sequence[Exercise], count: int, devices: int) -> None:
        super().__init__([partial(GeneratedPlacementEnv, pool, devices)] * count)

    def choose(self, numbers: NDArray[np.int64]) -> None:
        """Restrict drawing to the problems ``numbers`` of the pool from now on."""
        for environment in self.envs:
            environment.chosen = numbers

    def state(self) -> dict[str, Any]:
        """Return the state of all episodes, JSON compatible."""
        return {"episodes": [environment.state() for environment in self.envs]}

    def restore(self, state: Mapping[str, Any]) -> NDArray[np.float32]:
        """Continue from :meth:`state`; return the last observations (count, 8 + 8 M)."""
        return np.stack(
            [
                environment.restore(own)
                for environment, own in zip(self.envs, state["episodes"], strict=True)
            ]
        )
