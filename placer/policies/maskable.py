"""MaskablePPO that places op by op: the plain formulation, kept as a baseline.

It gets one scalar reward for hundreds of actions, and about ten episodes per second: at equal time
it loses to list scheduling. It is meant for comparison and for small graphs.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger

from envs.hardware.torch_devices import one_thread
from envs.placement_env import PlacementEnv
from envs.problem import Problem
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator


@one_thread()
def maskable_ppo(problem: Problem, budget: Budget, seed: int) -> Candidate:
    """Train on one problem until the budget is spent; return the best placement of all episodes.

    Args:
        problem: graph and cluster.
        budget: seconds, or evaluations: finished episodes. At least one episode is always finished.
        seed: of network and sampling.

    Returns:
        A candidate named "maskable ppo".
    """
    environment = _Remembering(PlacementEnv(pool=[problem]))
    model = MaskablePPO(
        "MlpPolicy",
        environment,
        n_steps=max(64, min(2048, 4 * problem.op_count)),
        batch_size=64,
        gamma=1.0,
        gae_lambda=1.0,
        learning_rate=1e-3,
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))  # the default one leaves a folder
    model.learn(sys.maxsize >> 1, callback=_Until(Meter(budget), environment))
    devices, priority = environment.best()
    return Evaluator(problem).candidate(Kind.OTHER, devices, priority, name="maskable ppo")


class _Remembering(gym.Wrapper[NDArray[np.float32], np.int64, NDArray[np.float32], np.int64]):
    """Keeps the best placement of all finished episodes."""

    def __init__(self, environment: PlacementEnv) -> None:
        super().__init__(environment)
        self.inner = environment
        self.episodes = 0
        self._best_reward = -np.inf
        self._best: tuple[NDArray[np.int32], NDArray[np.float64]] | None = None

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward, ended, cut, info = self.inner.step(action)
        if ended:
            self.episodes += 1
            if "placement" in info and reward > self._best_reward:
                self._best_reward = reward
                self._best = info["placement"].arrays()
        return observation, reward, ended, cut, info

    def action_masks(self) -> NDArray[np.bool_]:
        return self.inner.action_masks()

    def best(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        assert self._best is not None, "learning goes on until an episode has ended"
        return self._best


class _Until(BaseCallback):
    """Stops learning when the budget is spent and an episode has ended."""

    def __init__(self, meter: Meter, environment: _Remembering) -> None:
        super().__init__()
        self.meter = meter
        self.environment = environment

    def _on_step(self) -> bool:
        self.meter.spent = self.environment.episodes
        return self.environment.episodes == 0 or not self.meter.over()
