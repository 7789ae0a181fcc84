"""Training policies by reinforcement learning: see :mod:`placer.policies.training.run`."""

from placer.policies.training.config import TrainingConfig, load_config
from placer.policies.training.run import train
from placer.policies.training.scores import baselines, scores

__all__ = ["TrainingConfig", "baselines", "load_config", "scores", "train"]
