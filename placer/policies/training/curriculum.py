"""Graphs of a training: those of all stages in one pool, and those for validation and testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placer.policies.pool import Exercise, draw_pool
from placer.policies.scheduler_env import pool_scale
from placer.policies.training.config import TrainingConfig

TRAINING_SEED: Final = 1_000_000
STAGE_SEEDS: Final = 10_000_000
VALIDATION_SEED: Final = 2_000_000
TEST_SEED: Final = 3_000_000
"""Training seeds are added to TRAINING_SEED, so validation and test graphs stay the same."""


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

    def scale(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean and standard deviation (F,) of the summaries of all stages."""
        return pool_scale(self.pool)
