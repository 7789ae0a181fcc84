"""MaskablePPO on ``placer/Placement-v0``: the plain form of the problem, one op after the other.

It learns one problem from scratch, as a user of Gymnasium and sb3-contrib would, with the settings
of ``examples/train_placement_env.py``. It is a baseline: an episode has a step for every op, so one
core tries one or two placements of 1,000 ops a second, and one number rewards all of its steps.
"""

from __future__ import annotations

import sys
from typing import ClassVar, Final

import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback

from envs.hardware.torch_devices import one_thread
from envs.placement_env import PlacementEnv
from placer.search.candidate import Candidate
from placer.search.request import SearchRequest
from placer.search.sampling import BudgetedEvaluator, Sampling

STEPS: Final = 256
"""Ops that are placed between two updates."""


class OpByOp(Sampling):
    """Learns one problem from scratch; an evaluation is an episode."""

    name: ClassVar[str] = "op-by-op"

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate; torch's random numbers are as before."""
        with one_thread(), torch.random.fork_rng(devices=[]):
            return super().place(request)

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Learn, and evaluate the placement of every episode, until the budget is spent."""
        env = PlacementEnv(pool=[budgeted.evaluator.problem])
        model = MaskablePPO("MlpPolicy", env, n_steps=STEPS, gamma=1.0, seed=seed, device="cpu")
        model.learn(sys.maxsize, _Episodes(budgeted))


class _Episodes(BaseCallback):
    """Evaluates the placement of every episode; ends the training with the budget."""

    def __init__(self, budgeted: BudgetedEvaluator) -> None:
        super().__init__()
        self.budgeted = budgeted

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "placement" in info:
                self.budgeted.evaluate(*info["placement"].arrays())
        return not self.budgeted.over()
