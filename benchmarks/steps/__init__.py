"""Measured steps on two cores: the predictions of answers, and their speed over the unplaced model.

    python -m benchmarks steps
    python -m benchmarks "steps:loop, two towers, training"

For each model, training and inference, what ``placer.optimize`` answers:

* ``predicted``: its predicted over its measured step, in new workers each time; where the answer is
  to leave the model unplaced, of the fastest placement, too; and relative to one core;
* ``memory``: measured over predicted peak memory of the fastest placement;
* ``order``: rank correlation of predicted and measured steps, from random to good placements;
* ``speed``: the unplaced model's step over that of the answer, in the same rounds;
* ``loop``: the same in a training loop as users write it, with torch's own optimizer.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.record import Effort, Part
from benchmarks.steps import loops, orders, predictions, speeds
from benchmarks.steps.answers import Answers
from benchmarks.steps.models import MODELS

QUICK_MODEL: Final = "two towers, training"


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts of each model, one after the other, so that each is placed once."""
    answers = Answers(effort.pick(quick="3s", normal="20s", full="60s"))
    repeats = effort.pick(quick=2, normal=5, full=5)
    rounds = effort.pick(quick=3, normal=15, full=31)
    count = effort.pick(quick=5, normal=20, full=20)
    faster: dict[str, float] = {}
    found: dict[str, Part] = {}
    for name in [QUICK_MODEL] if effort.level == "quick" else MODELS:
        found |= {
            f"predicted, {name}": partial(predictions.predicted, answers, name, repeats),
            f"memory, {name}": partial(predictions.memory, answers, name),
            f"order, {name}": partial(orders.order, answers, name, count),
            f"speed, {name}": partial(speeds.speed, answers, name, rounds, faster),
            f"loop, {name}": partial(loops.loop, answers, name, rounds),
        }
    found["speed of all"] = partial(speeds.mean_speed, faster)
    return found
