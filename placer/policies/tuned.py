"""Settings and result of tuning a policy on measured step times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from envs.placement import Placement
from placer.policies.measuring import Run
from placer.policies.network import Policy
from placer.policies.training.config import Length, Ppo, TrainingConfig
from placer.search.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings of a tuning."""

    rounds: int = 6  # of measurements
    plans: int = 6  # sampled and run in each round
    decodes: int = 3000  # learned from the fitted simulator after each round
    budget: Budget = field(default_factory=lambda: Budget(seconds=20.0))  # of each simulated search
    learning_rate: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.plans < 2 or self.decodes < 0:
            raise ValueError(
                f"{self.rounds} rounds of {self.plans} plans: give 1 or more, of 2 or more"
            )

    def training(self, policy: Policy) -> TrainingConfig:
        """Return the learner's configuration; a rollout is one round."""
        return TrainingConfig(
            seeds=1,
            length=Length(decodes=self.rounds * (self.plans + self.decodes)),
            ppo=Ppo(
                environments=self.plans,
                steps=1,
                batch_size=self.plans,
                epochs=4,
                learning_rate=self.learning_rate,
                layers=tuple(len(bias) for _, bias in policy.layers[:-1]),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuned:
    """Result of a tuning."""

    policy: Policy  # its card describes the tuning
    best: Run  # of the final runs
    simulated: Run  # the choice of the simulated search, in the same runs
    placement: Placement  # of the best run, with predicted and measured times

    def save(self, out: Path) -> Path:
        """Write ``out``.safetensors, ``out``.json and the placement; return the placement's path.

        Raises:
            OSError: they cannot be written.
        """
        self.policy.save(out)
        path = out.with_name(f"{out.name}.placement.json")
        self.placement.save(path)
        return path
