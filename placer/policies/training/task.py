"""Task of a training: scheduler weights for a problem, by PPO; an episode is one decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.policies import BasePolicy

from placer.policies.decoders import Decoders, InProcess, Processes, RayTasks
from placer.policies.network import Policy, load
from placer.policies.pool import Exercise, draw_pool
from placer.policies.rewards import Rewards, relative_rewards
from placer.policies.scheduler_env import SchedulerBatch, pool_scale
from placer.policies.training.config import TrainingConfig
from placer.policies.training.learner import Learner, exported, imported
from placer.policies.training.scores import baselines, scores

TRAINING_SEED: Final = 1_000_000
STAGE_SEEDS: Final = 10_000_000
VALIDATION_SEED: Final = 2_000_000
TEST_SEED: Final = 3_000_000
"""Training seeds are added to TRAINING_SEED, so validation and test graphs stay the same."""
Ratios: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Ratios to the reference, (B,): of one placement each, and of the best of 16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curriculum:
    """Training, validation and test graphs; ``stages`` holds the numbers of each stage's graphs."""

    pool: Sequence[Exercise]
    stages: Sequence[NDArray[np.int64]]
    validation: Sequence[Exercise]
    tests: Sequence[Exercise]

    @classmethod
    def drawn(cls, config: TrainingConfig) -> Curriculum:
        """Draw all graphs of a training, in a second or two for a hundred."""
        pool: list[Exercise] = []
        stages: list[NDArray[np.int64]] = []
        for number, stage in enumerate(config.stage):
            seed = TRAINING_SEED + config.first_seed + STAGE_SEEDS * number
            drawn = draw_pool(seed, stage.graphs, stage.max_ops, stage.families, stage.clusters)
            stages.append(np.arange(len(pool), len(pool) + len(drawn)))
            pool += drawn
        test = config.test
        validation, tests = (
            draw_pool(seed, test.graphs, test.max_ops, test.families, test.clusters)
            for seed in (VALIDATION_SEED, TEST_SEED)
        )
        return cls(pool=pool, stages=stages, validation=validation, tests=tests)

    @classmethod
    def of_one(cls, item: Exercise) -> Curriculum:
        """Train, validate and test on one problem."""
        return cls(pool=[item], stages=[np.zeros(1, np.int64)], validation=[item], tests=[item])


class Task:
    """Makes the learners of all seeds, and scores and writes what they learned.

    ``decoders`` hold the training graphs and are closed with the task; with measured steps they
    hold those to score on, too.
    """

    def __init__(
        self, config: TrainingConfig, curriculum: Curriculum, decoders: Decoders | None = None
    ) -> None:
        self.config = config
        self.curriculum = curriculum
        self.decoders = decoders or _decoders(config, curriculum)
        self.start = load(config.start) if config.start else None
        if self.start is None:
            self.scale = pool_scale(curriculum.pool)
        else:
            self.scale = self.start.feature_mean, self.start.feature_deviation
        self._scored = self.decoders if config.backend == "measured" else None
        self._relative: Rewards | None = None

    def blank(self, seed: int) -> Learner:
        """Return a learner to be restored."""
        return Learner(self.config, seed, self._batch(seed))

    def learner(self, seed: int) -> Learner:
        """Return a new learner, which begins with the policy ``start`` or with HEFT."""
        learner = self.blank(seed)
        if self.start is not None:
            imported(learner.model.policy, self.start)
        return learner

    def _batch(self, seed: int) -> SchedulerBatch:
        if self._relative is None and self.config.ppo.reward == "relative":
            references = np.array([item.reference_ns for item in self.curriculum.pool], np.int64)
            deviation = math.exp(self.config.ppo.log_std)
            self._relative = relative_rewards(self.decoders, references, deviation)
        return SchedulerBatch(
            self.curriculum.pool,
            self.config.ppo.environments,
            seed,
            self.decoders,
            scale=self.scale,
            rewards=self._relative,
            best_of=self.config.ppo.best_of,
        )

    def tensors(self, network: BasePolicy) -> dict[str, NDArray[Any]]:
        """Return the tensors of the trained policy."""
        return exported(network, "", *self.scale).tensors()

    def scores(self, network: BasePolicy, pool: Sequence[Exercise]) -> Ratios:
        """Return the scores of a network."""
        return scores(exported(network, "", *self.scale), pool, decoders=self._scored)

    def together(self, tensors: Sequence[Mapping[str, Any]], pool: Sequence[Exercise]) -> Ratios:
        """Return the scores of policies that propose together."""
        return scores(_joined("", {}, tensors), pool, decoders=self._scored)

    def baselines(self, pool: Sequence[Exercise]) -> dict[str, float]:
        """Return the scores of heuristics and of untrained scheduler weights."""
        return baselines(math.exp(self.config.ppo.log_std), pool, self._scored)

    def save(
        self, path: Path, card: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write ``path``.safetensors and ``path``.json, from the best policy and others."""
        _joined(path.name, card, tensors).save(path)

    def close(self) -> None:
        """Release processes and connections."""
        self.decoders.close()


def _joined(name: str, card: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> Policy:
    first, *others = (Policy.of(name, card, network) for network in tensors)
    return replace(first, others=tuple(others))


def _decoders(config: TrainingConfig, curriculum: Curriculum) -> Decoders:
    evaluators = [item.evaluator for item in curriculum.pool]
    if config.ray_address is not None:
        return RayTasks(evaluators, config.ray_address)
    count = config.workers
    return (
        Processes(evaluators, count) if isinstance(count, int) and count else InProcess(evaluators)
    )
