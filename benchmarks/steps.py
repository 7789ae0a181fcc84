"""Measured training steps as placed, against one device and the unplaced model.

    python -m benchmarks steps

For each model: the step of the best placement on the first two cores (the first accelerator and the
CPU, if there is one) against the best single device, the unplaced model with torch's threads on all
cores, and predicted over measured steps of all candidates that ran.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from envs.hardware.torch_devices import cuda_devices
from graphs.extract import Workload
from graphs.models import Nmt, NmtConfig
from placer.api import optimize
from placer.messages import CPU_CLOCK
from placer.result import Result
from placer.search.candidate import Candidate
from placer.sources.target import load_step

FOLDER: Final = Path(__file__).parents[1] / "graphs" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Measured training steps of one model, medians in seconds.

    On a busy machine those of one device and of the best are CPU-clock times, and
    ``single_wall_s`` and ``best_wall_s`` are not the same.
    """

    model: str
    ops: int
    best: str  # the name of the candidate that was chosen
    single_s: float
    best_s: float
    single_wall_s: float
    best_wall_s: float
    speed_up: float
    unplaced_s: float | None  # one process with torch's threads on all cores
    predicted_over_measured: Mapping[str, float]  # of every candidate that ran

    @classmethod
    def of(cls, model: str, found: Result) -> Steps:
        """Return the numbers of an optimization that ran its candidates."""
        ran = [row for row in found.candidates if row.measurement is not None and row.can_run]
        unplaced, single = found.unplaced, found.single
        return cls(
            model=model,
            ops=len(found.problem.graph),
            best=found.best.name,
            single_s=found.step_s(single) if single is not None else float("nan"),
            best_s=found.step_s(found.best),
            single_wall_s=_wall_s(single),
            best_wall_s=_wall_s(found.best),
            speed_up=found.speedup,
            unplaced_s=None if unplaced is None or unplaced.failure else _wall_s(unplaced),
            predicted_over_measured={row.name: row.predicted_s / found.step_s(row) for row in ran},
        )


def _wall_s(row: Candidate | None) -> float:
    """Return the median of a candidate by the wall clock; nan if it was not run."""
    seen = row.measurement if row is not None else None
    return seen.median_s if seen is not None else float("nan")


def translation() -> Workload:
    """Return a step of recurrent translation with attention, eight words, 32 sentences."""

    def loss(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())

    torch.manual_seed(0)
    config = NmtConfig()
    source = torch.randint(config.vocabulary, (32, 8))
    target = torch.randint(config.vocabulary, (32, 9))
    inputs = (source, target[:, :-1].contiguous(), target[:, 1:].contiguous())
    return Workload(Nmt(config).train(), inputs, loss=loss)


MODELS: Final[Mapping[str, Callable[[], Workload]]] = {
    "two towers, batch 256": partial(load_step, f"{FOLDER}/two_towers.py:build", training=True),
    "Inception-V3, batch 2": partial(load_step, f"{FOLDER}/inception.py:build", training=True),
    "translation with attention, batch 32": translation,
}


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each model."""
    budget = effort.pick(quick="3s", normal="20s", full="20s")
    count = effort.pick(quick=1, normal=len(MODELS), full=len(MODELS))
    return {name: partial(measured, name, budget) for name in list(MODELS)[:count]}


def measured(model: str, budget: str, found: dict[str, Any]) -> Table:
    """Place a training step and run the best candidates.

    Raises:
        PlacementError: every candidate failed when it was run.
    """
    step, devices = MODELS[model](), devices_here()
    result = optimize(
        step.model, step.inputs, loss=step.loss, devices=devices, budget=budget, progress=False
    )
    own = Steps.of(model, result)
    found.update(asdict(own), devices=devices, budget=budget)
    return step_table(own, devices)


def devices_here() -> str:
    """Return the devices of the benchmark on this machine."""
    if accelerators := cuda_devices():
        return f"{accelerators[0]},cpu"
    return ",".join(f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2])


def step_table(own: Steps, devices: str) -> Table:
    """Return the measurements of one model."""
    return Table(
        "Training steps",
        f"measured on {devices}, medians in ms by the wall clock; on a busy machine {CPU_CLOCK}, "
        "with those by the wall clock in brackets",
        ("model", "ops", "one device", "placed", "speed-up", "unplaced", "predicted / measured"),
        (
            (
                own.model,
                f"{own.ops:,}",
                _both(own.single_s, own.single_wall_s),
                _both(own.best_s, own.best_wall_s),
                f"{own.speed_up:.2f}x",
                "-" if own.unplaced_s is None else f"{own.unplaced_s * 1e3:.1f}",
                _range(list(own.predicted_over_measured.values())),
            ),
        ),
    )


def _both(step_s: float, wall_s: float) -> str:
    """Return a step in ms, with that by the wall clock in brackets if it differs."""
    wall = f" ({wall_s * 1e3:.1f})" if np.isfinite(wall_s) and wall_s != step_s else ""
    return f"{step_s * 1e3:.1f}{wall}"


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
