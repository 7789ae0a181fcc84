"""The loop that users write, ``placed.step`` and then the optimizer, against the unplaced one.

In the same rounds the steps are measured as a search measures them, in workers of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
    """Time turns of the placed loop, the unplaced loop and both measured steps, in turn."""
    answer = answers.of(name)
    result, extraction = answer.result, answer.extraction
    twin = step_copy(extraction.step)
    [device] = answer.unplaced.placement.used_devices
    unplaced = UnplacedModel(replace(extraction, step=twin), cores_of(device))
    step = extraction.step
    both = [result.best.placement, answer.unplaced.placement]
    with ExitStack() as opened:
        placed = opened.enter_context(placer.apply(step.model, result, optimizer=step.optimizer))
        turns: list[Callable[[], TimedStep]] = [
            partial(turn, looped(placed, step)),
            partial(turn, looped(unplaced, twin)),
            *opened.enter_context(answer.turns(both)),
        ]
        found["rounds_s"] = rounds_s = rounds_of(turns, rounds)
    loops = [row[1] / row[0] for row in rounds_s]
    steps = [row[3] / row[2] for row in rounds_s]
    said = answer.unplaced.ranking_s(contended=False) / result.best.ranking_s(contended=False)
    ratio = statistics.median(loops)
    placed_s, unplaced_s, *_ = map(statistics.median, zip(*rounds_s, strict=True))
    found.update(unplaced_over_placed=loops, measured=steps, verdict=said)
    return Table(
        "Loops",
        "a step and torch's optimizer, medians in ms by the wall clock; the unplaced loop's time "
        "over that of the answer, median and range of paired turns; and over the same ratio of "
        "steps measured in these rounds, and of the search's last runs",
        (
            "model",
            "answer",
            "its loop",
            "unplaced",
            "unplaced / answer",
            "of these rounds",
            "of the search",
        ),
        (
            (
                name,
                result.best.name,
                f"{placed_s * 1e3:.1f}",
                f"{unplaced_s * 1e3:.1f}",
                spread(loops, ".2f"),
                f"{ratio / statistics.median(steps):.2f}",
                f"{ratio / said:.2f}",
            ),
        ),
    )


def rounds_of(turns: Sequence[Callable[[], TimedStep]], rounds: int) -> list[list[float]]:
    """Return the seconds of all turns in each round, after an uncounted one.

    Each round starts with another turn, as in measuring.
    """
    rounds_s = []
    for number in range(rounds + 1):
        row = [0.0] * len(turns)
        for place in range(len(turns)):
            at = (place + number) % len(turns)
            row[at] = turns[at]().wall_s
        rounds_s.append(row)
    return rounds_s[1:]


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
