"""The sentences that users read about a result: one function per sentence, "" if it does not apply.

The functions take plain data, and decide by it whether there is something to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.hardware.core_sets import has_several_cores
from envs.hardware.discover import is_core
from envs.hardware.units import milliseconds, ratio_of
from envs.measurement import CONTENDED, tied
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
SMALLEST_GAIN: Final = 0.01
"""Relative difference below which two step times count as equal."""
NO_OPTIMIZER: Final = "No optimizer is in the step: neither its time nor its state is counted."


# --- the verdict


def headline(best: Candidate, verdict: str) -> str:
    """Return the chosen candidate with the verdict."""
    return f"Best: {best.name} - {verdict}"


def gain(best: Candidate, single: Candidate, lower_bound_s: float, *, contended: bool) -> str:
    """Return the gain over the best single device, or that there is none."""
    if best.is_single:
        gap = single.predicted_s / lower_bound_s - 1 if lower_bound_s else 0.0
        if gap <= NO_HEADROOM:
            return (
                f"No headroom: one device is within {gap:.1%} of the lower bound of "
                f"{milliseconds(lower_bound_s)} ms, which no placement can beat."
            )
        return (
            "No headroom was found: no other placement is faster than one device by more than "
            f"noise (the lower bound leaves {gap:.0%})."
        )
    names = single.placement.device_names
    of_what = unplaced_model(single) if single.is_unplaced else names[single.devices[0]]
    faster = f"faster than {of_what}"
    runs, of_single = best.measurement, single.measurement
    if runs is None or of_single is None:
        ratio = ratio_of(single.predicted_s, best.predicted_s)
        return f"{ratio:.2f}x {faster}, predicted."
    ratio = ratio_of(of_single.step_s(contended=contended), runs.step_s(contended=contended))
    if not contended:
        return f"{ratio:.2f}x {faster}, measured."
    by_wall = of_single.median_s / runs.median_s
    return (
        f"{ratio:.2f}x {faster}, by {CPU_CLOCK} ({by_wall:.2f}x by the wall clock of a busy "
        "machine)."
    )


def does_not_fit(candidate: Candidate) -> str:
    """Return why an infeasible placement cannot run."""
    return f"It does not fit. {candidate.why}"


def no_single_device(candidates: Sequence[Candidate], problem: Problem) -> str:
    """Return why no single device can run the step."""
    failed = [each for each in candidates if each.is_single and each.failure]
    if failed:
        return f"No single device could be run to compare with: {failed[0].failure}"
    able = problem.allowed.all(axis=0)
    pinned_to = {name for names in problem.graph.allowed for name in names or ()}
    if able.any():
        which = "that the pins allow " if pinned_to else "that knows all ops "
        return (
            f"No single device {'' if able.all() else which}has room for the whole step; this "
            "placement makes it fit."
        )
    if pinned_to:
        names = " and ".join(name for name in problem.cluster.names if name in pinned_to)
        return f"No single device may run the whole step: ops are pinned to {names}."
    return "No single device has costs for all ops."


def sentence_count(text: str) -> int:
    """Return the number of sentences in a text.

    >>> sentence_count("It is 1.19x faster. Nothing to gain.")
    2
    """
    return text.removesuffix(".").count(". ") + 1


def leave_unplaced(
    unplaced: Candidate, fastest: Candidate | None, *, contended: bool = False
) -> str:
    """Return that no placement gains anything over the unplaced model, and by how much."""
    [device] = unplaced.placement.used_devices
    where = f", on {device}" if len(unplaced.placement.device_names) > 1 else ""
    nothing = f"Nothing to gain: leave the model unplaced{where}."
    if fastest is None or fastest.measurement is None or unplaced.measurement is None:
        return nothing
    ratio = ratio_of(
        fastest.measurement.step_s(contended=contended),
        unplaced.measurement.step_s(contended=contended),
    )
    if tied(fastest.measurement, unplaced.measurement, contended=contended):
        return f"{nothing} {fastest.name}, the fastest placement, took {ratio:.2f} as long: a tie."
    return f"{nothing} It is {ratio:.2f}x faster than the fastest placement, {fastest.name}."


def only_unplaced(best: Candidate, others: Sequence[Candidate], *, contended: bool) -> str:
    """Return where to leave a model unplaced whose ops cannot be placed, and what that gains."""
    [device] = best.placement.used_devices
    leave = f"Leave the model unplaced, on {device}"
    best_s = best.ranking_s(contended=contended)
    slower = [
        f"{ratio_of(each.ranking_s(contended=contended), best_s):.2f}x faster than on {name}"
        for each in others
        if each.can_run and each.is_comparable(contended=contended)
        for name in each.placement.used_devices
    ]
    known = "measured" if best.measurement is not None else "predicted"
    return f"{leave}: {', '.join(slower)}, {known}." if slower else f"{leave}."


def against_unplaced(best: Candidate, unplaced: Candidate | None, *, contended: bool) -> str:
    """Return how the best candidate compares with the unplaced model."""
    if unplaced is None or best.measurement is None or unplaced.measurement is None:
        return ""
    if unplaced.failure:
        return f"Undecided against {unplaced_model(unplaced)}, which could not be run."
    if not unplaced.is_comparable(contended=contended):
        return f"Undecided against {unplaced_model(unplaced)}: the machine is too busy to compare."
    ratio = ratio_of(
        unplaced.measurement.step_s(contended=contended),
        best.measurement.step_s(contended=contended),
    )
    return f"{ratio:.2f}x faster than {unplaced_model(unplaced)}."


def unplaced_model(candidate: Candidate) -> str:
    """Return which unplaced model a candidate is."""
    [device] = candidate.placement.used_devices
    on_threads = "with torch's threads on the same cores"
    return f"the unplaced model {on_threads if candidate.is_on_threads else f'on {device}'}"


def proof(candidates: Sequence[Candidate], lower_bound_s: float) -> str:
    """Return whether a solver proved that no placement has a shorter predicted step."""
    if all(each.bound_ns is None for each in candidates):
        return ""
    shortest = min(candidates, key=lambda each: each.predicted_s)
    its_step = f"{shortest.name}, {milliseconds(shortest.predicted_s)} ms"
    gap = 1 - ratio_of(lower_bound_s, shortest.predicted_s)
    if gap <= 0:
        return f"Proven optimal: no placement has a shorter predicted step than {its_step}."
    return (
        f"Not proven optimal: the solver stopped with a gap of {gap:.1%} between {its_step}, and "
        f"the lower bound of {milliseconds(lower_bound_s)} ms."
    )


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
    alone = ", ".join(
        f"{runs.contention:.3g} x on {each.placement.device_names[each.devices[0]]}"
        for each, runs in ran
        if each.is_single
    )
    return (
        f"This machine was busy: wall times are {slower:.3g} x CPU-clock times"
        f"{f' ({alone} alone)' if alone else ''}, where up to {CONTENDED} x is quiet, so "
        f"candidates are compared by {CPU_CLOCK}; clear cached times with `placer "
        "machine --clear-cache` and run again when `placer machine` says good."
    )


def long_runs(needed_s: float, seconds: float) -> str:
    """Return that the shortest runs take longer than they may."""
    return f"Steps are long: the runs take about {needed_s:.0f} s instead of {seconds:.0f} s."


def few_rounds(best: Candidate) -> str:
    """Return how sure an answer is that time did not suffice to confirm."""
    rounds = 0 if best.measurement is None else len(best.measurement.wall_s)
    some = "one round" if rounds == 1 else f"{rounds} rounds"
    return f"Only {some} decided: a longer --measure-budget makes the answer surer."


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
    remarks += [f"Not by {tried}" for tried in by_reason(extraction.fell_back)]
    return remarks


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
