"""Training of policies by reinforcement learning, see :mod:`placer.policies.training.run`."""

from placer.policies.training.config import Length, TrainingConfig, config_of, load_config
from placer.policies.training.run import train
from placer.policies.training.scores import baselines, scores

__all__ = [
    "Length",
    "TrainingConfig",
    "baselines",
    "config_of",
    "load_config",
    "scores",
    "train",
]
