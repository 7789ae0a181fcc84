"""Training configurations that take seconds, and their TOML."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from placer.policies.pool import Clusters
from placer.policies.records import plain
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
TWO_STAGES = replace(
    TINY,
    seeds=2,
    checkpoint_rollouts=3,
    length=Length(decodes=480),
    stage=(
        Stage(families=("layered",), graphs=3, max_ops=80),
        Stage(families=("grid",), graphs=3, max_ops=80, clusters=Clusters(comm_ratio=(1.0, 4.0))),
    ),
    ppo=replace(SMALL_PPO, final_learning_rate=1e-4, average_rollouts=20),
)


def curve(path: Path) -> list[dict[str, str]]:
    """Return the log of the training at a path without suffix, without times."""
    with path.with_name(f"{path.name}.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "spent_s"} for row in csv.DictReader(file)]


def toml(config: TrainingConfig) -> str:
    return inline_toml(plain(config))


def inline_toml(data: Mapping[str, Any]) -> str:
    """Return TOML with one line per key and inline tables; None values are omitted."""

    def shown(value: object) -> str:
        if isinstance(value, dict):
            items = (f"{json.dumps(k)} = {shown(v)}" for k, v in value.items() if v is not None)
            return "{" + ", ".join(items) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(shown, value)) + "]"
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return json.dumps(value)

    lines = (f"{json.dumps(k)} = {shown(v)}" for k, v in data.items() if v is not None)
    return "\n".join(lines) + "\n"
