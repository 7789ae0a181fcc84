"""Speed of the answers over the unplaced model, measured in the same rounds."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.steps.answers import Answers
from benchmarks.tables import Table, spread
from envs.backend import measurements
from envs.measurement import contended

TITLE = "Speed of steps"
NOTE = (
    "step of the unplaced model / step of the answer, median and range of paired rounds, by the "
    "wall clock; 1 where the answer is to leave the model unplaced; then of the fastest placement"
)
COLUMNS = ("model", "answer", "unplaced / answer", "unplaced / placed", "machine")


def speed(
    answers: Answers, name: str, rounds: int, faster: dict[str, float], found: dict[str, Any]
) -> Table:
    """Run the fastest placement and the unplaced model in turn; add the speed to ``faster``."""
    answer = answers.of(name)
    placed, best = answer.placed, answer.result.best
    both = [placed.placement, answer.unplaced.placement]
    runs = measurements(answer.measured(both, placed.predicted_s, rounds))
    ratios = (runs[1].wall_s / runs[0].wall_s).tolist()
    faster[name] = 1.0 if best.is_unplaced else statistics.median(ratios)
    machine = "busy" if contended(runs) else "quiet"
    found.update(
        answer=best.name,
        placed_s=runs[0].wall_s,
        unplaced_s=runs[1].wall_s,
        unplaced_over_placed=ratios,
        machine=machine,
    )
    row = name, best.name, f"{faster[name]:.2f}x", spread(ratios, ".2f"), machine
    return Table(TITLE, NOTE, COLUMNS, (row,))


def mean_speed(faster: dict[str, float], found: dict[str, Any]) -> Table | None:
    """Return the geometric mean over the models that were measured, if any were."""
    if not faster:
        return None
    found["geometric_mean"] = statistics.geometric_mean(faster.values())
    row = f"geometric mean of {len(faster)}", "", f"{found['geometric_mean']:.2f}x", "", ""
    return Table(TITLE, NOTE, COLUMNS, (row,))
