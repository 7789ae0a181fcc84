"""The models whose steps are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from graphs.extract import Workload
from graphs.optimizer import Optimizer
from placer.sources.target import load_step

FOLDER: Final = Path(__file__).parents[2] / "graphs" / "models"
TARGETS: Final = {
    "two towers": f"{FOLDER}/two_towers.py:build",
    "NASNet-A": f"{FOLDER}/nasnet.py:build",
    "Inception-V3": f"{FOLDER}/inception.py:build",
    "translation": f"{FOLDER}/nmt.py:build",
    "mixture of experts": f"{FOLDER}/moe.py:build",
    "transformer": "hf:bert?batch=1&sequence=64&num_hidden_layers=4",
}


def _step(target: str, *, training: bool, optimizer: str | None = None) -> Workload:
    return replace(load_step(target, training=training), optimizer=Optimizer.of(optimizer))


MODELS: Final[Mapping[str, Callable[[], Workload]]] = {
    **{
        f"{name}, {kind}": partial(_step, target, training=kind == "training")
        for name, target in TARGETS.items()
        for kind in ("training", "inference")
    },
    "two towers, adamw": partial(_step, TARGETS["two towers"], training=True, optimizer="adamw"),
}
