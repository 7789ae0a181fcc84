"""The loop that users write, ``placed.step`` and then the optimizer, against the unplaced one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

import placer
from benchmarks.steps.answers import Answers
from benchmarks.tables import Table, spread
from envs.executors.unplaced import UnplacedModel
from envs.hardware.discover import cores_of
from envs.measured import TimedStep, turn
from graphs.extract import Workload
from graphs.workload import step_copy

LEARNING_RATE: Final = 1e-6


def loop(answers: Answers, name: str, rounds: int, found: dict[str, Any]) -> Table:
    """Time turns of the placed and of the unplaced loop, one after the other."""
    answer = answers.of(name)
    result, extraction = answer.result, answer.extraction
    twin = step_copy(extraction.step)
    [device] = answer.unplaced.placement.used_devices
    unplaced = UnplacedModel(replace(extraction, step=twin), cores_of(device))
    step = extraction.step
    with placer.apply(step.model, result, optimizer=step.optimizer) as placed:
        loops = [looped(placed, step), looped(unplaced, twin)]
        pairs = [[turn(each).wall_s for each in loops] for _ in range(rounds + 1)][1:]
    ratios = [unplaced_s / placed_s for placed_s, unplaced_s in pairs]
    said = answer.unplaced.ranking_s(contended=False) / result.best.ranking_s(contended=False)
    ratio = statistics.median(ratios)
    placed_s, unplaced_s = (statistics.median(own) for own in zip(*pairs, strict=True))
    found.update(pairs_s=pairs, unplaced_over_placed=ratios, verdict=said)
    return Table(
        "Loops",
        "a step and torch's optimizer, medians in ms by the wall clock; the unplaced loop's time "
        "over that of the answer, median and range of paired turns, and over what was measured",
        ("model", "answer", "its loop", "unplaced", "unplaced / answer", "as measured"),
        (
            (
                name,
                result.best.name,
                f"{placed_s * 1e3:.1f}",
                f"{unplaced_s * 1e3:.1f}",
                spread(ratios, ".2f"),
                f"{ratio / said:.2f}",
            ),
        ),
    )


def looped(model: Any, step: Workload) -> Callable[[], TimedStep]:
    """Return one pass of a loop over the example batch."""
    trained = [t for t in step.named_state().values() if t.requires_grad]
    updates = step.training and step.optimizer is None
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE) if updates else None

    def once() -> TimedStep:
        start_s = time.perf_counter()
        if optimizer is not None:
            optimizer.zero_grad()
        model.step(*step.step_inputs, **step.keywords)
        if optimizer is not None:
            optimizer.step()
        return TimedStep(wall_s=time.perf_counter() - start_s)

    return once
