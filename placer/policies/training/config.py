"""Configuration of a training: a TOML file, in which every value has a default of its backend.

``trained_policies/NAME.toml``::

    format = "placer-training/1"
    backend = "simulated"          # reward: simulated steps of generated graphs, or
                                   # "measured": of one model, on devices of this machine
    start = ""                     # policy to begin with, by name or path; "": HEFT
    seeds = 5                      # number of policies to train
    keep = 5                       # number of policies to keep: the best, and the most helpful
    first_seed = 0
    device = "cpu"                 # of the network: cpu | cuda
    workers = 0                    # processes for decoding, 0: only this one; or a Ray cluster:
                                   # "ray" or "ray://HOST:PORT", for decoding or for measuring
    checkpoint_rollouts = 20       # rollouts between checkpoints

    [length]                       # of each seed
    decodes = 350_000              # the same on every machine; or instead
    # seconds = 100.0              # see Length

    [ppo]                          # see Ppo

    [[stage]]                      # one after the other, see Stage
    share = 0.25                   # of the length, relative to the other stages'
    families = ["layered", "grid"] # of graphs/synthetic/families.py, or "reference"
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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from graphs.strict_json import load_toml, within
from graphs.synthetic.families import FEWEST_OPS
from placer.policies.network import GENERALIST
from placer.policies.pool import Clusters, families
from placer.policies.records import Items, Within, check_ranges, plain, record
from placer.policies.rewards import TOGETHER
from placer.ray_cluster.address import address_of

FORMAT: Final = "placer-training/1"
MOST_SEEDS: Final = 1_000_000
"""Larger seeds would draw test graphs."""
MOST_STEPS: Final = 1 << 20
"""Maximum steps of all environments together in a rollout, which is kept in memory."""
MOST_OPS: Final = 10**8
"""Maximum ops of all graphs of a stage together: each op takes about a kilobyte."""
LearningRate: TypeAlias = Annotated[float, Within(1e-9, 1.0)]
Layers: TypeAlias = Annotated[tuple[Annotated[int, Within(1, 4096)], ...], Items(0, 8)]
Graphs: TypeAlias = Annotated[int, Within(1, 100_000)]
Ops: TypeAlias = Annotated[int, Within(FEWEST_OPS, 100_000)]  # every family can be that small
UNIMPORTANT: Final = ("workers", "checkpoint_rollouts")
"""Keys without influence on the trained policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Length of each seed's training: either ``decodes`` or ``seconds``.

    Seconds are of the processor, or of the clock where there are workers or steps are measured.

    A decode is the construction and simulation of one placement.
    """

    decodes: Annotated[int, Within(1, 10**12)] | None = None
    seconds: Annotated[float, Within(1e-3, 1e8)] | None = None

    def __post_init__(self) -> None:
        if (self.decodes is None) == (self.seconds is None):
            raise ValueError("a length is either decodes or seconds: give one of them")
        check_ranges(self)

    def share(self, decodes: int, spent_s: float) -> float:
        """Return the finished share, 0 .. 1, and above 1 if it was overrun."""
        if self.decodes is not None:
            return decodes / self.decodes
        assert self.seconds is not None
        return spent_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    """Hyperparameters of PPO (stable-baselines3)."""

    environments: Annotated[int, Within(1, 16_384)] = 64
    steps: Annotated[int, Within(1, 65_536)] = 8  # of each environment in a rollout
    batch_size: Annotated[int, Within(2, MOST_STEPS)] = 256  # at least 2: advantages are normalised
    epochs: Annotated[int, Within(1, 10_000)] = 6
    learning_rate: LearningRate = 1e-3
    final_learning_rate: Annotated[float, Within(0.0, 1.0)] | None = (
        None  # reached linearly at the end; None: constant
    )
    clip: Annotated[float, Within(1e-6, 10.0)] = 0.2
    entropy: Annotated[float, Within(0.0, 1.0)] = 0.0
    layers: Layers = (16,)  # hidden, of the policy: larger ones generalise worse
    critic_layers: Layers = (64, 64)
    log_std: Annotated[float, Within(-10.0, 2.0)] = -1.6  # initial, of actions
    average_rollouts: Annotated[int, Within(1, 10**6)] = 1  # of the policy's averaging window
    reward: Literal["relative", "plain"] = "relative"  # see placer/policies/rewards.py
    best_of: Annotated[int, Within(1, TOGETHER)] = 1  # above 1: maximize the best of so many

    def __post_init__(self) -> None:
        check_ranges(self)
        within(self.environments * self.steps, 2, MOST_STEPS, "environments x steps")
        if self.best_of > 1 and self.environments % TOGETHER:
            raise ValueError(
                f"environments is {self.environments}, but with best_of they are in groups of "
                f"{TOGETHER}: choose a multiple"
            )

    def learning_rate_at(self, share: float) -> float:
        """Return the learning rate when ``share`` of the training is done."""
        if self.final_learning_rate is None:
            return self.learning_rate
        part = min(share, 1.0)
        return (1.0 - part) * self.learning_rate + part * self.final_learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage of a curriculum: graphs to draw from while it lasts."""

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
    """Graphs not used for training: for choosing the seed, and as many again for the card."""

    families: tuple[str, ...] = field(default_factory=families)
    graphs: Graphs = 56
    max_ops: Ops = 800
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_graphs(self.families, self.graphs, self.max_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Configuration of a training; see the module's docstring."""

    format: Literal["placer-training/1"] = FORMAT
    backend: Literal["simulated", "measured"] = "simulated"
    start: str = ""  # policy to begin with
    seeds: Annotated[int, Within(1, 1000)] = 5
    keep: Annotated[int, Within(1, 1000)] = 5
    first_seed: Annotated[int, Within(0, MOST_SEEDS - 1)] = 0
    device: Literal["cpu", "cuda"] = "cpu"
    workers: Annotated[int, Within(0, 256)] | str = 0
    checkpoint_rollouts: Annotated[int, Within(1, 10**6)] = 20
    length: Length = field(default_factory=lambda: Length(decodes=350_000))
    ppo: Ppo = field(default_factory=Ppo)
    stage: Annotated[tuple[Stage, ...], Items(1, 100)] = field(default_factory=lambda: (Stage(),))
    test: Testing = field(default_factory=Testing)

    def __post_init__(self) -> None:
        check_ranges(self)
        on_ray = self.ray_address is not None
        if self.backend == "measured":
            for name in ("stage", "test") if on_ray else ("workers", "stage", "test"):
                if getattr(self, name) != getattr(SIMULATED, name):
                    instead = ", or name a Ray cluster" if name == "workers" else ""
                    raise ValueError(f"{name}: with backend measured leave it out{instead}")

    @property
    def ray_address(self) -> str | None:
        """Return the address of the Ray cluster to use, "" for the default; None without."""
        return address_of(self.workers) if isinstance(self.workers, str) else None

    @property
    def graph_bytes(self) -> int:
        """Most memory of all graphs together, about a kilobyte for an op.

        As many graphs as for testing are for choosing the seed.
        """
        training = sum(stage.graphs * stage.max_ops for stage in self.stage)
        return 1000 * (training + 2 * self.test.graphs * self.test.max_ops)

    def stage_at(self, share: float) -> int:
        """Return the stage to run when ``share`` of the length is done."""
        total = sum(stage.share for stage in self.stage)
        end = 0.0
        for number, stage in enumerate(self.stage):
            end += stage.share / total
            if share < end:
                return number
        return len(self.stage) - 1

    def essence(self) -> dict[str, Any]:
        """Return the keys that determine the trained policies, JSON compatible."""
        return {key: value for key, value in plain(self).items() if key not in UNIMPORTANT}


def load_config(path: Path, backend: str | None = None) -> TrainingConfig:
    """Read a configuration. What it leaves out is as in the default one of its backend.

    ``backend``, if given, overrides the file's.
    """
    return load_toml(path, partial(_config, backend=backend))


def config_of(
    path: Path | None = None,
    *,
    length: Length | None = None,
    families: Sequence[str] | None = None,
    **overrides: Any,
) -> TrainingConfig:
    """Return the configuration of a file, or the default one of the backend, with some overrides.

    ``families`` are those of all stages; an override that is None changes nothing.
    """
    values = {name: value for name, value in overrides.items() if value is not None}
    if path is not None:
        config = load_config(path, values.get("backend"))
    else:
        config = MEASURED if values.get("backend") == "measured" else SIMULATED
    if length is not None:
        values["length"] = length
    if families is not None:
        values["stage"] = tuple(replace(stage, families=tuple(families)) for stage in config.stage)
    return record(TrainingConfig, plain(replace(config, **values)))


def _config(data: dict[str, Any], backend: str | None) -> TrainingConfig:
    if "format" not in data:
        raise ValueError(f'format is missing: write format = "{FORMAT}"')
    data = data if backend is None else {**data, "backend": backend}
    if data.get("backend") == MEASURED.backend:
        defaults = plain(MEASURED)
        if isinstance(of_file := data.get("ppo"), dict):
            data = {**data, "ppo": {**defaults["ppo"], **of_file}}
        data = {**defaults, **data}
    return record(TrainingConfig, data)


def check_graphs(chosen: tuple[str, ...], graphs: int, max_ops: int) -> None:
    """Check that the families exist, and that memory suffices for this many graphs."""
    families(chosen)
    if not chosen:
        raise ValueError("families is empty: leave it out for all but chains")
    within(graphs * max_ops, 1, MOST_OPS, "graphs x max_ops")


SIMULATED: Final = TrainingConfig()
MEASURED: Final = TrainingConfig(
    backend="measured",
    start=GENERALIST,
    seeds=1,
    checkpoint_rollouts=1,
    length=Length(decodes=256),
    ppo=Ppo(environments=8, steps=1, batch_size=8, epochs=4, learning_rate=3e-4, reward="plain"),
)
"""Default configurations of both backends."""
