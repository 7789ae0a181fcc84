"""What a training is: a TOML file, every value of which has a default.

``trained_policies/NAME.toml``::

    format = "placer-training/1"
    algorithm = "ppo"              # ppo: decoder weights, | maskable-ppo: devices op by op
    seeds = 5                      # as many policies are trained
    keep = 5                       # so many of them are kept: the best, and what helps it most
    first_seed = 0
    device = "cpu"                 # of the network: cpu | cuda
    workers = 0                    # processes that decode, 0: none but this one; or "ray"
    checkpoint_rollouts = 20       # a checkpoint every so many rollouts

    [length]                       # of each seed
    decodes = 350_000              # the same on every machine; or instead
    # seconds = 100.0              # of processor time

    [ppo]                          # see Ppo

    [imitation]                    # see Imitation; without it nothing is imitated
    graphs = 120

    [[stage]]                      # one after the other, see Stage
    share = 0.25                   # of the length, relative to the other stages'
    families = ["layered", "grid"] # of graphs/synthetic.py, or "reference"
    graphs = 120
    max_ops = 160

    [stage.clusters]               # see placer/policies/pool.py: Clusters
    devices = [2, 4]
    comm_ratio = [0.1, 5.0]

    [test]                         # graphs for choosing the seed, and as many for the card
    graphs = 56
    max_ops = 800
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from graphs.synthetic import FEWEST_OPS
from graphs.whole_file import read_limited
from placer.policies.pool import Clusters, families
from placer.policies.training.records import plain, record

FORMAT: Final = "placer-training/1"
LARGEST_FILE_BYTES: Final = 10**6
MOST_SEEDS: Final = 1_000_000
"""Seeds beyond would draw graphs that are for testing."""
UNIMPORTANT: Final = ("workers", "checkpoint_rollouts", "ray_address")
"""What has no influence on what is learnt."""

Algorithm: TypeAlias = Literal["ppo", "maskable-ppo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long each seed trains: ``decodes`` or ``seconds`` of processor time, one of them.

    A decode is a placement that is made and simulated; op by op, it is the choice for one op.
    """

    decodes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.decodes is None) == (self.seconds is None):
            raise ValueError("a length is either decodes or seconds: give one of them")
        amount = self.seconds if self.decodes is None else self.decodes
        if amount is None or not amount > 0:
            raise ValueError(f"a length of {amount} decodes or seconds must be above 0")

    def share(self, decodes: int, spent_s: float) -> float:
        """How much of it is done, 0 .. 1, and above where it was overrun."""
        if self.decodes is not None:
            return decodes / self.decodes
        assert self.seconds is not None
        return spent_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    """Hyperparameters of PPO (stable-baselines3), with or without masks."""

    environments: int = 64
    steps: int = 8  # of each environment in a rollout
    batch_size: int = 256
    epochs: int = 6
    learning_rate: float = 1e-3
    final_learning_rate: float | None = None  # reached linearly at the end; None: it stays
    clip: float = 0.2
    entropy: float = 0.0
    layers: tuple[int, ...] = (16,)  # hidden, of the policy: larger ones carry over worse
    critic_layers: tuple[int, ...] = (64, 64)
    log_std: float = -1.6  # at first, of actions; op by op there is none
    average_rollouts: int = 1  # the policy is the mean of the network over about so many rollouts
    reward: Literal["relative", "plain"] = "relative"  # see placer/policies/rewards.py

    def __post_init__(self) -> None:
        _above_zero(self, "environments", "steps", "batch_size", "epochs", "learning_rate", "clip")
        _above_zero(self, "average_rollouts")
        if self.environments * self.steps < 2 or self.batch_size < 2:
            raise ValueError("a rollout and a batch need two decodes at least: their mean is taken")

    def learning_rate_at(self, share: float) -> float:
        """The learning rate when ``share`` of the training is done."""
        if self.final_learning_rate is None:
            return self.learning_rate
        part = min(share, 1.0)
        return (1.0 - part) * self.learning_rate + part * self.final_learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """What the network imitates first: the weights that a short evolution finds for each graph."""

    graphs: int = 0  # the first so many of all stages in turn; 0: nothing is imitated
    decodes: int = 150  # of each evolution
    sigma: float = 0.25
    epochs: int = 10  # of regression on what was found: more of them generalise worse
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        _above_zero(self, "decodes", "sigma", "epochs", "learning_rate")
        if self.graphs < 0:
            raise ValueError(f"graphs is {self.graphs}, below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Part of a curriculum: graphs that take their turns while it lasts."""

    share: float = 1.0  # of the length, relative to the sum over all stages
    families: tuple[str, ...] = field(default_factory=families)
    graphs: int = 240
    max_ops: int = 360
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        _above_zero(self, "share", "graphs")
        check_graphs(self.families, self.max_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testing:
    """Graphs never seen in training: for choosing the seed, and as many again for the card."""

    families: tuple[str, ...] = field(default_factory=families)
    graphs: int = 56
    max_ops: int = 800
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        _above_zero(self, "graphs")
        check_graphs(self.families, self.max_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """A training; see the head of this file."""

    format: Literal["placer-training/1"] = FORMAT
    algorithm: Algorithm = "ppo"
    seeds: int = 5
    keep: int = 5
    first_seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    workers: int | Literal["ray"] = 0
    ray_address: str = ""  # of a cluster that runs; "" starts one of this machine
    checkpoint_rollouts: int = 20
    length: Length = field(default_factory=lambda: Length(decodes=350_000))
    ppo: Ppo = field(default_factory=Ppo)
    imitation: Imitation = field(default_factory=Imitation)
    stage: tuple[Stage, ...] = field(default_factory=lambda: (Stage(),))
    test: Testing = field(default_factory=Testing)

    def __post_init__(self) -> None:
        _above_zero(self, "seeds", "keep", "checkpoint_rollouts")
        if not 0 <= self.first_seed < MOST_SEEDS:
            raise ValueError(f"first_seed is {self.first_seed}, not within 0 .. {MOST_SEEDS - 1}")
        if isinstance(self.workers, int) and self.workers < 0:
            raise ValueError(f'workers is {self.workers}: give 0 or more processes, or "ray"')
        if not self.stage:
            raise ValueError("there is no stage: leave [[stage]] out for the default one")
        if self.algorithm == "maskable-ppo" and self.imitation.graphs:
            raise ValueError("imitation: only decoder weights are imitated, with algorithm ppo")
        if self.algorithm == "maskable-ppo" and self.workers != 0:
            raise ValueError("workers decode: with algorithm maskable-ppo leave them out")

    def stage_at(self, share: float) -> int:
        """Which stage goes on when ``share`` of the length is done."""
        total = sum(stage.share for stage in self.stage)
        end = 0.0
        for number, stage in enumerate(self.stage):
            end += stage.share / total
            if share < end:
                return number
        return len(self.stage) - 1

    def essence(self) -> dict[str, Any]:
        """What decides what is learnt, as JSON holds it."""
        return {key: value for key, value in plain(self).items() if key not in UNIMPORTANT}


def load_config(path: Path) -> TrainingConfig:
    """Read a configuration.

    Raises:
        ValueError: it is not TOML, is larger than 1 MB, or a key is unknown or has an impossible
            value; the message starts with the file and the path of the key.
        OSError: it cannot be read.
    """
    try:
        data = tomllib.loads(read_limited(path, LARGEST_FILE_BYTES).decode())
        if "format" not in data:
            raise ValueError(f'format is missing: write format = "{FORMAT}"')
        return record(TrainingConfig, data)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _above_zero(values: object, *names: str) -> None:
    for name in names:
        if not getattr(values, name) > 0:
            raise ValueError(f"{name} is {getattr(values, name)}, not above 0")


def check_graphs(chosen: tuple[str, ...], max_ops: int) -> None:
    """Make sure that there are such families, of such a size.

    Raises:
        ValueError: there are not.
    """
    families(chosen)
    if not chosen:
        raise ValueError("families is empty: leave it out for all but chains")
    if max_ops < FEWEST_OPS:
        raise ValueError(f"max_ops is {max_ops}, below the {FEWEST_OPS} that every family can keep")
