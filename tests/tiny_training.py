"""Trainings so small that tests are quick."""

from __future__ import annotations

from placer.policies.training import TrainingConfig
from placer.policies.training.config import Length, Ppo, Stage, Testing

SMALL_PPO = Ppo(environments=4, steps=2, batch_size=4, epochs=2, layers=(8,))
TINY = TrainingConfig(
    seeds=1,
    checkpoint_rollouts=1,
    length=Length(decodes=32),
    ppo=SMALL_PPO,
    stage=(Stage(families=("layered",), graphs=2, max_ops=80),),
    test=Testing(graphs=2, max_ops=80, families=("layered", "grid")),
)
