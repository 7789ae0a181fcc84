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

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from graphs.strict_json import load_toml, within
from graphs.synthetic import FEWEST_OPS
from placer.policies.pool import Clusters, families
from placer.policies.records import Items, Within, check_ranges, plain, record

FORMAT: Final = "placer-training/1"
MOST_SEEDS: Final = 1_000_000
"""Seeds beyond would draw graphs that are for testing."""
MOST_STEPS: Final = 1 << 20
"""Of all environments together in a rollout, which is kept in memory."""
MOST_OPS: Final = 10**8
"""Of all graphs of a stage together: about a kilobyte is kept of each."""
LearningRate: TypeAlias = Annotated[float, Within(1e-9, 1.0)]
Layers: TypeAlias = Annotated[tuple[Annotated[int, Within(1, 4096)], ...], Items(0, 8)]
Graphs: TypeAlias = Annotated[int, Within(1, 100_000)]
Ops: TypeAlias = Annotated[int, Within(FEWEST_OPS, 100_000)]  # every family can keep to FEWEST_OPS
UNIMPORTANT: Final = ("workers", "checkpoint_rollouts", "ray_address")
"""What has no influence on what is learnt."""

Algorithm: TypeAlias = Literal["ppo", "maskable-ppo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long each seed trains: ``decodes`` or ``seconds`` of processor time, one of them.

    A decode is a placement that is made and simulated; op by op, it is the choice for one op.
    """

    decodes: Annotated[int, Within(1, 10**12)] | None = None
    seconds: Annotated[float, Within(1e-3, 1e8)] | None = None

    def __post_init__(self) -> None:
        if (self.decodes is None) == (self.seconds is None):
            raise ValueError("a length is either decodes or seconds: give one of them")
        check_ranges(self)

    def share(self, decodes: int, spent_s: float) -> float:
        """How much of it is done, 0 .. 1, and above where it was overrun."""
        if self.decodes is not None:
            return decodes / self.decodes
        assert self.seconds is not None
        return spent_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    """Hyperparameters of PPO (stable-baselines3), with or without masks."""

    environments: Annotated[int, Within(1, 16_384)] = 64
    steps: Annotated[int, Within(1, 65_536)] = 8  # of each environment in a rollout
    batch_size: Annotated[int, Within(2, MOST_STEPS)] = 256  # a mean is taken
    epochs: Annotated[int, Within(1, 10_000)] = 6
    learning_rate: LearningRate = 1e-3
    final_learning_rate: Annotated[float, Within(0.0, 1.0)] | None = (
        None  # reached linearly at the end; None: it stays
    )
    clip: Annotated[float, Within(1e-6, 10.0)] = 0.2
    entropy: Annotated[float, Within(0.0, 1.0)] = 0.0
    layers: Layers = (16,)  # hidden, of the policy: larger ones carry over worse
    critic_layers: Layers = (64, 64)
    log_std: Annotated[float, Within(-10.0, 2.0)] = -1.6  # at first, of actions; not op by op
    average_rollouts: Annotated[int, Within(1, 10**6)] = 1  # whose mean the policy is, about
    reward: Literal["relative", "plain"] = "relative"  # see placer/policies/rewards.py

    def __post_init__(self) -> None:
        check_ranges(self)
        within(self.environments * self.steps, 2, MOST_STEPS, "environments x steps")

    def learning_rate_at(self, share: float) -> float:
        """The learning rate when ``share`` of the training is done."""
        if self.final_learning_rate is None:
            return self.learning_rate
        part = min(share, 1.0)
        return (1.0 - part) * self.learning_rate + part * self.final_learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """What the network imitates first: the weights that a short evolution finds for each graph."""

    graphs: Annotated[int, Within(0, 100_000)] = 0  # the first of all stages in turn; 0: none
    decodes: Annotated[int, Within(1, 10**6)] = 150  # of each evolution
    sigma: Annotated[float, Within(1e-6, 10.0)] = 0.25
    epochs: Annotated[int, Within(1, 10_000)] = 10  # of regression: more generalise worse
    learning_rate: LearningRate = 1e-3

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Part of a curriculum: graphs that take their turns while it lasts."""

    share: Annotated[float, Within(1e-6, 1e6)] = 1.0  # of the length, relative to all stages'
    families: tuple[str, ...] = field(default_factory=families)
    graphs: Graphs = 240
    max_ops: Ops = 360
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_graphs(self.families, self.graphs, self.max_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testing:
    """Graphs never seen in training: for choosing the seed, and as many again for the card."""

    families: tuple[str, ...] = field(default_factory=families)
    graphs: Graphs = 56
    max_ops: Ops = 800
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_graphs(self.families, self.graphs, self.max_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """A training; see the head of this file."""

    format: Literal["placer-training/1"] = FORMAT
    algorithm: Algorithm = "ppo"
    seeds: Annotated[int, Within(1, 1000)] = 5
    keep: Annotated[int, Within(1, 1000)] = 5
    first_seed: Annotated[int, Within(0, MOST_SEEDS - 1)] = 0
    device: Literal["cpu", "cuda"] = "cpu"
    workers: Annotated[int, Within(0, 256)] | Literal["ray"] = 0
    ray_address: str = ""  # of a cluster that runs; "" starts one of this machine
    checkpoint_rollouts: Annotated[int, Within(1, 10**6)] = 20
    length: Length = field(default_factory=lambda: Length(decodes=350_000))
    ppo: Ppo = field(default_factory=Ppo)
    imitation: Imitation = field(default_factory=Imitation)
    stage: Annotated[tuple[Stage, ...], Items(1, 100)] = field(default_factory=lambda: (Stage(),))
    test: Testing = field(default_factory=Testing)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.algorithm == "maskable-ppo" and self.imitation.graphs:
            raise ValueError("imitation: only decoder weights are imitated, with algorithm ppo")
        if self.algorithm == "maskable-ppo" and self.workers != 0:
            raise ValueError("workers decode: with algorithm maskable-ppo leave them out")

    @property
    def graph_bytes(self) -> int:
        """Most memory of all graphs together, about a kilobyte for an op."""
        return 1000 * sum(stage.graphs * stage.max_ops for stage in self.stage)

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
    return load_toml(path, _config)


def _config(data: dict[str, Any]) -> TrainingConfig:
    if "format" not in data:
        raise ValueError(f'format is missing: write format = "{FORMAT}"')
    return record(TrainingConfig, data)


def check_graphs(chosen: tuple[str, ...], graphs: int, max_ops: int) -> None:
    """Make sure that there are such families, and that so many graphs can be kept.

    Raises:
        ValueError: there are not, or they cannot.
    """
    families(chosen)
    if not chosen:
        raise ValueError("families is empty: leave it out for all but chains")
    within(graphs * max_ops, 1, MOST_OPS, "graphs x max_ops")
