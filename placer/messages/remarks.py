"""Sentences that qualify the numbers of a result, or say why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.hardware.core_sets import has_several_cores
from envs.hardware.discover import is_core
from envs.hardware.units import ratio_of
from envs.measurement import CONTENDED, Measurement
from envs.measurement import contended as is_contended
from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import PHASES
from placer.search.candidate import Candidate

if TYPE_CHECKING:
    from graphs.extract import Extraction

CPU_CLOCK: Final = "CPU-clock time"
"""Time of a step recomputed from CPU clocks, without the effect of other processes."""
NO_HEADROOM: Final = 0.02
"""Relative gap to the lower bound below which a single device leaves no headroom."""
NOISY: Final = 0.2
"""Spread (interquartile range over median) above which a measurement gets a remark."""
PREDICTION_ERROR: Final = 0.15
UNPREDICTED_BYTES: Final = 64 << 20
"""Tolerated excess over predicted memory, for libraries and kernels of any model."""
NO_OPTIMIZER: Final = "No optimizer is in the step: neither its time nor its state is counted."


# --- why nothing can run


def no_placement(candidates: Sequence[Candidate]) -> str:
    """Return why no candidate is feasible."""
    if any(each.bound_s == np.inf for each in candidates):
        return (
            "The model fits nowhere: the solver proved that no placement keeps to memory and "
            "links, even without activations. Add a device, or one with more memory."
        )
    short = [each for each in candidates if each.prediction and each.prediction.missing_bytes]
    if not short:
        first = candidates[0]
        return f"No placement that was found within the budget can run. {first.name}: {first.why}"
    nearest = min(short, key=lambda each: each.prediction.missing_bytes if each.prediction else 0)
    return (
        "No placement that was found within the budget keeps to memory. "
        f"{nearest.name} misses by least: {nearest.why} A longer --budget may find one that fits."
    )


def all_failed(candidates: Sequence[Candidate]) -> str:
    """Return why no candidate could be run."""
    reasons = dict.fromkeys(each.failure for each in candidates)
    return "Every candidate failed when it was run: " + "; ".join(reasons)


# --- remarks on measurements


def not_measured(trouble: str, *, stopped: bool) -> str:
    """Return why nothing was measured."""
    if trouble:
        return f"Nothing was measured: {trouble}"
    return "Nothing was measured: it was stopped before the first complete round." * stopped


def busy_machine(candidates: Sequence[Candidate], *, contended: bool) -> str:
    """Return how busy the machine was, "" if it was quiet.

    Candidates are compared by CPU-clock time if the runs were ``contended``. Where only the
    unplaced model was run they are not: on several cores it has no CPU clock.
    """
    ran = [
        (each, runs)
        for each in candidates
        if (runs := each.measurement) is not None and runs.has_cpu_clock and not runs.node
    ]
    if not contended:
        only_unplaced = all(each.is_unplaced for each in candidates)
        if not (only_unplaced and is_contended([runs for _, runs in ran])):
            return ""
        return (
            "This machine was busy, and only wall times compare the model on several cores: run "
            "again when `placer machine` says good."
        )
    slower = float(np.median([runs.contention for each, runs in ran if not each.is_unplaced]))
    return (
        f"This machine was busy: wall times are {slower:.3g} x CPU-clock times, where up to "
        f"{CONTENDED} x is quiet, so candidates are compared by {CPU_CLOCK}; clear cached times "
        "with `placer machine --clear-cache` and run again when `placer machine` says good."
    )


def long_runs(needed_s: float, seconds: float) -> str:
    """Return that the shortest runs take longer than they may."""
    return f"Steps are long: the runs take about {needed_s:.0f} s instead of {seconds:.0f} s."


def few_rounds(best: Candidate) -> str:
    """Return how sure an answer is that time did not suffice to confirm."""
    rounds = "0 rounds" if best.measurement is None else round_count(best.measurement)
    return f"Only {rounds} decided: a longer --measure-budget makes the answer surer."


def round_count(runs: Measurement) -> str:
    """Return the number of rounds as words."""
    return "one round" if len(runs.wall_s) == 1 else f"{len(runs.wall_s)} rounds"


def impossible_gain(speed_up: float, single: Candidate, lower_bound_s: float) -> str:
    """Return that a speed-up is larger than the costs of the ops allow."""
    possible = single.predicted_s / lower_bound_s if lower_bound_s > 0 else np.inf
    if not speed_up > possible * (1 + PREDICTION_ERROR):
        return ""
    return (
        f"More than {possible:.2f}x is not possible by the costs of the ops, so something "
        "disturbed the runs of one device: measure again on a quieter machine."
    )


def tie(best: Candidate, candidates: Sequence[Candidate], *, contended: bool) -> str:
    """Return why a candidate was chosen although another was faster."""
    best_s = best.ranking_s(contended=contended)
    ran = [
        each
        for each in candidates
        if each.measurement is not None and each.can_run and not each.eliminated
        if each.is_comparable(contended=contended)
    ]
    if best.measurement is None or all(
        best_s <= each.ranking_s(contended=contended) for each in ran
    ):
        return ""
    return "The fastest candidates are within noise, so the simplest of them was chosen."


def scatter(candidate: Candidate) -> str:
    """Return that the runs of a candidate vary a lot."""
    runs = candidate.measurement
    if runs is None or not runs.spread > NOISY:
        return ""
    return (
        f"The runs of {candidate.name} vary by {runs.spread:.0%}: a quieter machine may rank the "
        "candidates differently."
    )


def prediction_error(candidate: Candidate, *, contended: bool) -> str:
    """Return how far the prediction is from the measurement."""
    error = ratio_of(candidate.predicted_s, candidate.ranking_s(contended=contended))
    if abs(error - 1) <= PREDICTION_ERROR:
        return ""
    measured = CPU_CLOCK if contended else "measured time"
    return (
        f"The predicted step of {candidate.name} is {error:.2f} of its {measured}, so the search "
        "may have missed better placements."
    )


def no_hand_over(problem: Problem, placement: Placement) -> str:
    """Return that steps were run without their hand-over, which only a copy of a model measures."""
    names = problem.cluster.names
    on_workers = all(map(is_core, names)) and not (len(names) == 1 and has_several_cores(names[0]))
    if problem.graph.hand_over_s or not on_workers or placement.unplaced:
        return ""
    return (
        "Measured steps exclude handing over batch and results, since copy.deepcopy cannot copy "
        "the model: `placed.step` takes longer. A working `__deepcopy__` of the model mends it."
    )


def fitted_costs(candidate: Candidate) -> str:
    """Return that costs were fitted to the runs, as the prediction of a candidate was off."""
    error = ratio_of(candidate.predicted_s, candidate.ranking_s(contended=False))
    return (
        f"The predicted step of {candidate.name} was {error:.2f} of its measured time, so op costs "
        "were fitted to the runs: predictions are by the fitted costs."
    )


def unpredicted_memory(candidate: Candidate) -> Iterator[str]:
    """Yield the devices on which a candidate took more memory than predicted."""
    runs = candidate.measurement
    for name, size in (runs.peak_memory_bytes if runs is not None else {}).items():
        predicted = candidate.peak_memory_bytes.get(name, 0)
        if size > predicted * (1 + PREDICTION_ERROR) + UNPREDICTED_BYTES:
            yield (
                f"{candidate.name} took {size / 1e9:.3g} GB on {name}, but {predicted / 1e9:.3g} "
                "GB was predicted."
            )


def failures(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield the candidates that failed when they were run."""
    for candidate in candidates:
        if candidate.failure:
            yield f"{candidate.name} failed: {candidate.failure}"


# --- remarks on the graph


def no_optimizer(problem: Problem) -> str:
    """Return that a training step has no parameter update."""
    phases = set(problem.graph.phase.tolist())
    has_none = PHASES.index("backward") in phases and PHASES.index("optimizer") not in phases
    return NO_OPTIMIZER if has_none else ""


def core_refusal(extraction: Extraction) -> str:
    """Return why ops cannot be placed on pinned cores and what to do, "" if they can."""
    refusal = extraction.core_refusal
    return refusal and f"{refusal[0].upper()}{refusal[1:]}."


def core_refusal_in_short(extraction: Extraction) -> str:
    """Return in one sentence why ops cannot be placed on pinned cores, "" if they can."""
    from graphs.extract.errors import shown_lines

    if not extraction.core_refusal:
        return ""
    modules = ", nor can" if extraction.modules_refused else ": extractor modules places"
    return (
        f"The ops of {type(extraction.step.model).__name__} cannot be placed on pinned cores, "
        f"since it reads values of tensors ({shown_lines(extraction.depends_on_data)})"
        f"{modules} whole modules."
    )


def whole_modules(extraction: Extraction) -> str:
    """Return why whole modules are placed although nobody asked for them, "" if ops are."""
    from graphs.extract.extraction import by_reason

    if extraction.extractor != "modules" or not extraction.fell_back:
        return ""
    _, _, reason = by_reason(extraction.fell_back)[-1].partition(": ")
    return f"Whole modules are placed, not ops: {reason}"


def extraction_remarks(extraction: Extraction, *, refusal: bool = True) -> list[str]:
    """Return remarks on the extraction, the most important first; of cores with ``refusal``."""
    from graphs.extract.errors import shown_lines
    from graphs.extract.extraction import by_reason

    remarks = [core_refusal(extraction)] if refusal and extraction.core_refusal else []
    if extraction.unchecked:
        remarks.append(
            "A placed step leaves out what only checks or reports values: "
            f"{shown_lines(extraction.unchecked)}."
        )
    reasons = [f"Not by {tried}" for tried in by_reason(extraction.fell_back)]
    if of_modules := whole_modules(extraction):
        return [of_modules, *remarks, *reasons[:-1]]
    return [*remarks, *reasons]


# --- the legend of the table of candidates

LEGEND: Final = (
    "> chosen; predicted: by the simulator; speed-up: over all on one device; memory: "
    "predicted peak"
)
MEASURED_LEGEND: Final = (
    "wall, min: median and shortest by the wall clock; spread: between the quartiles, over the "
    "median; in brackets: predicted, as it was not run, or not once more with the fastest"
)
CORES_LEGEND: Final = f"CPU clock: {CPU_CLOCK}, without the effect of other processes"
TORCH_LEGEND: Final = "every device is waited for; CPU clock: the same as wall"
WARM_START_LEGEND: Final = "warm start: the placement of --start-from"
WHERE_ALLOWED_LEGEND: Final = (
    "where allowed: ops that pins or missing costs keep off that device are elsewhere"
)
UNPLACED_LEGEND: Final = (
    "unplaced: the model as it is, with torch's threads on all cores, or on one device"
)
