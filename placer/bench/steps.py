"""What placements win when they really run, and how well their steps were predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional as F

from envs.cluster import Cluster
from graphs.extract import Step
from graphs.models import InceptionConfig, InceptionV3, Nmt, NmtConfig, TwoTowers
from placer.api import optimize
from placer.bench.table import Table
from placer.messages import CPU_CLOCK
from placer.report.progress import Progress
from placer.result import Result
from placer.search.candidate import Candidate

AUXILIARY_WEIGHT: Final = 0.4


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
        """The figures of an optimization that ran its candidates."""
        ran = [row for row in found.candidates if row.measurement is not None and row.can_run]
        unplaced, single = found.all_cores, found.single
        return cls(
            model=model,
            ops=len(found.problem.graph),
            best=found.best.name,
            single_s=found.step_s(single) if single is not None else float("nan"),
            best_s=found.step_s(found.best),
            single_wall_s=_wall_s(single),
            best_wall_s=_wall_s(found.best),
            speed_up=found.speed_up,
            unplaced_s=unplaced.median_s if unplaced is not None and unplaced.ok else None,
            predicted_over_measured={row.name: row.predicted_s / found.step_s(row) for row in ran},
        )


def _wall_s(row: Candidate | None) -> float:
    """Median of a candidate by the wall clock; nan where it was not run."""
    seen = row.measurement if row is not None else None
    return seen.median_s if seen is not None else float("nan")


def two_towers() -> Step:
    """Two stacks of matrices that meet in one product, a batch of 256 pairs."""
    torch.manual_seed(0)
    inputs = (torch.randn(256, 1024), torch.randn(256, 1024), torch.randint(2, (256,)).float())
    return Step(TwoTowers().train(), inputs, loss=F.binary_cross_entropy_with_logits)


def inception() -> Step:
    """Inception-V3 with its auxiliary classifier, a batch of two images."""

    def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        logits, auxiliary = output
        return F.cross_entropy(logits, labels) + AUXILIARY_WEIGHT * F.cross_entropy(
            auxiliary, labels
        )

    torch.manual_seed(0)
    model = InceptionV3(InceptionConfig(dropout=0.0)).train()
    return Step(model, (torch.randn(2, 3, 299, 299), torch.randint(1000, (2,))), loss=loss)


def translation() -> Step:
    """Recurrent translation with attention, eight words, a batch of 32 sentences."""

    def loss(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())

    torch.manual_seed(0)
    config = NmtConfig()
    source = torch.randint(config.vocabulary, (32, 8))
    target = torch.randint(config.vocabulary, (32, 9))
    inputs = (source, target[:, :-1].contiguous(), target[:, 1:].contiguous())
    return Step(Nmt(config).train(), inputs, loss=loss)


MODELS: Final[Mapping[str, Callable[[], Step]]] = {
    "two towers, batch 256": two_towers,
    "Inception-V3, batch 2": inception,
    "translation with attention, batch 32": translation,
}


def measured_steps(
    models: Sequence[str], devices: str | Cluster, budget: str, progress: Progress
) -> list[Steps]:
    """Place training steps of :data:`MODELS` and run the best candidates.

    Raises:
        PlacementError: every candidate of a model failed when it was run.
    """
    found = []
    for number, name in enumerate(models):
        progress.advance(number / len(models), name)
        step = MODELS[name]()
        placed = optimize(
            step.model,
            step.inputs,
            loss=step.loss,
            devices=devices,
            budget=budget,
            progress=False,
        )
        found.append(Steps.of(name, placed))
    return found


def step_table(found: Sequence[Steps], devices: str) -> Table:
    """Models with what was measured of them."""
    note = (
        f"; where it is in brackets, the machine was busy, and the number before it is {CPU_CLOCK}"
    )
    note = note if any(each.best_s != each.best_wall_s for each in found) else ""
    return Table(
        "Training steps",
        f"really run on {devices}, medians in ms by the wall clock" + note,
        ("model", "ops", "one device", "placed", "speed-up", "unplaced", "predicted / measured"),
        tuple(
            (
                each.model,
                f"{each.ops:,}",
                _both(each.single_s, each.single_wall_s),
                _both(each.best_s, each.best_wall_s),
                f"{each.speed_up:.2f}x",
                "-" if each.unplaced_s is None else f"{each.unplaced_s * 1e3:.1f}",
                _range(list(each.predicted_over_measured.values())),
            )
            for each in found
        ),
    )


def _both(step_s: float, wall_s: float) -> str:
    """A step in ms, and by the wall clock where that is another time."""
    wall = f" ({wall_s * 1e3:.1f})" if np.isfinite(wall_s) and wall_s != step_s else ""
    return f"{step_s * 1e3:.1f}{wall}"


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
