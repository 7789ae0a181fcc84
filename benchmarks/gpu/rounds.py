"""Steps that are run in turn, in the same rounds, so that ties can be judged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.record import quartiles
from envs.measured import Failure, TimedStep
from envs.measurement import Measurement, larger, tied

ROUNDS: Final = 7
SLOW_ROUNDS: Final = 3
PAIRS: Final = 15
FEWEST_PAIRS: Final = 3
WARM_UP: Final = 3


@dataclass(frozen=True, slots=True)
class Contestant:
    """A step that has a turn in each of the first ``rounds`` rounds."""

    run: Callable[[], TimedStep | Failure]
    rounds: int = ROUNDS


def in_rounds(contestants: Sequence[Contestant]) -> list[Measurement]:
    """Run all in turn, each round starting with another one; one that fails has no more turns."""
    measurements = [Measurement(wall_s=np.empty(0), cpu_clock_s=np.empty(0)) for _ in contestants]
    for number in range(max(each.rounds for each in contestants)):
        for turn in range(len(contestants)):
            k = (turn + number) % len(contestants)
            if not measurements[k].failure and number < contestants[k].rounds:
                measurements[k] = _with(measurements[k], contestants[k].run())
    return measurements


def _with(before: Measurement, done: TimedStep | Failure) -> Measurement:
    before = replace(
        before,
        peak_memory_bytes=larger(before.peak_memory_bytes, done.peak_memory_bytes),
        reserved_memory_bytes=larger(before.reserved_memory_bytes, done.reserved_memory_bytes),
    )
    if isinstance(done, Failure):
        return replace(before, failure=done.reason, overfull=done.overfull)
    wall_s = np.append(before.wall_s, done.wall_s)
    return replace(before, wall_s=wall_s, cpu_clock_s=wall_s)


def mark_ties(rows: Sequence[dict[str, Any]], measurements: Sequence[Measurement]) -> None:
    """Tell in each row whether it is tied with the fastest in the rounds that both have."""
    ran = [one for one in measurements if one.ok]
    fastest = min(ran, key=lambda one: one.median_s, default=None)
    for row, one in zip(rows, measurements, strict=True):
        row["tied_with_fastest"] = fastest is not None and tied_in_common(one, fastest)


def tied_in_common(one: Measurement, other: Measurement) -> bool:
    """Return whether both ran and are tied in the first rounds, those that both have."""
    if not (one.ok and other.ok):
        return False
    rounds = min(len(one.wall_s), len(other.wall_s))
    return tied(*(of_seconds(each.wall_s[:rounds]) for each in (one, other)))


def of_seconds(seconds: Sequence[float] | np.typing.NDArray[np.float64]) -> Measurement:
    """Return the measurement of steps that took these wall times."""
    wall_s = np.asarray(seconds, np.float64)
    return Measurement(wall_s=wall_s, cpu_clock_s=wall_s)


def compared(
    steps: Mapping[str, Callable[[], float]], seconds: float, *, warm_up: int = WARM_UP
) -> dict[str, Any]:
    """Time two steps in turn, for about this long; return both, and whether they are tied.

    The steps return their seconds.
    """
    for _ in range(warm_up):
        pair_s = sum(step() for step in steps.values())
    rounds = min(max(round(seconds / pair_s), FEWEST_PAIRS), PAIRS)
    measurements = in_rounds([Contestant(partial(_timed, step), rounds) for step in steps.values()])
    return as_compared(dict(zip(steps, (one.wall_s for one in measurements), strict=True)))


def _timed(step: Callable[[], float]) -> TimedStep:
    return TimedStep(wall_s=step())


def as_compared(seconds: dict[str, Any]) -> dict[str, Any]:
    """Return the times of two steps in the same rounds, {name: seconds}, and their comparison."""
    (first, one_s), (second, other_s) = seconds.items()
    return {
        **{name: quartiles(step_s) for name, step_s in seconds.items()},
        f"{second}_over_{first}".replace(" ", "_"): statistics.median(
            other / one for one, other in zip(one_s, other_s, strict=True)
        ),
        "tied": tied(of_seconds(one_s), of_seconds(other_s)),
    }
