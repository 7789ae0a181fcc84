"""Predicted and measured step and memory of the answers."""

from __future__ import annotations

from typing import Any

from benchmarks.steps.answers import Answers
from benchmarks.tables import Table, spread


def predicted(answers: Answers, name: str, repeats: int, found: dict[str, Any]) -> Table:
    """Compare the predicted step of the answer with its step in new workers, several times."""
    answer = answers.of(name)
    best, placed, core = answer.result.best, answer.placed, answer.one_core
    chosen = list(dict.fromkeys((best, placed, core)))
    ratios: dict[str, list[float]] = {each.name: [] for each in chosen}
    for _ in range(repeats):
        results = answer.measured([each.placement for each in chosen], placed.predicted_s)
        for each, result in zip(chosen, results, strict=True):
            ratios[each.name].append(each.predicted_s / result.step_s)
    drift = [a / b for a, b in zip(ratios[placed.name], ratios[core.name], strict=True)]
    off = answer.result.mispredicted
    before = None if off is None else off.predicted_s / off.ranking_s(contended=False)
    found.update(verdict=answer.result.verdict, predicted_over_measured=ratios, before_a_fit=before)
    return Table(
        "Predicted steps",
        f"predicted / measured, median and range of {repeats} measurements in new workers "
        "(CPU-clock times on a busy machine); the last column is over the same ratio of one core "
        "in these rounds, without what the machine's speed changed since op costs were measured; "
        "before a fit: of the answer or the fastest placement, in the rounds that costs were "
        "fitted to",
        (
            "model",
            "answer",
            "predicted ms",
            "predicted / measured",
            "fastest placement",
            "over one core",
            "before a fit",
        ),
        (
            (
                name,
                f"{best.name}, costs fitted" if answer.result.mispredicted else best.name,
                f"{best.predicted_s * 1e3:.1f}",
                spread(ratios[best.name], ".2f"),
                "the answer" if best is placed else spread(ratios[placed.name], ".2f"),
                spread(drift, ".2f"),
                "-" if before is None else f"{before:.2f}",
            ),
        ),
    )


def memory(answers: Answers, name: str, found: dict[str, Any]) -> Table:
    """Compare the predicted peak memory of the fastest placement with that of its workers."""
    answer = answers.of(name)
    placed = answer.placed
    [result] = answer.measured([placed.placement], placed.predicted_s)
    pairs = {
        device: (size, result.peak_memory_bytes[device])
        for device, size in placed.peak_memory_bytes.items()
        if size
    }
    found.update(placement=placed.name, predicted_and_measured_bytes=pairs)
    ratios = [measured / size for size, measured in pairs.values()]
    return Table(
        "Memory of steps",
        "peak memory of the workers of the fastest placement, measured / predicted by device",
        ("model", "predicted MB", "measured MB", "measured / predicted"),
        (
            (
                name,
                *(" + ".join(f"{pair[k] / 1e6:.0f}" for pair in pairs.values()) for k in (0, 1)),
                spread(ratios, ".2f"),
            ),
        ),
    )
