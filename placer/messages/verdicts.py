"""The sentences of the verdict, the last line of a result: one answer to take home."""

from __future__ import annotations

from collections.abc import Sequence

from envs.hardware.units import milliseconds, ratio_of
from envs.measurement import tied
from envs.problem import Problem
from placer.messages.remarks import CPU_CLOCK, NO_HEADROOM, round_count
from placer.search.candidate import Candidate


def headline(best: Candidate, verdict: str) -> str:
    """Return the chosen candidate with the verdict."""
    return f"Best: {best.name} - {verdict}"


def gain(best: Candidate, single: Candidate, lower_bound_s: float, *, contended: bool) -> str:
    """Return the gain over the best single device, or that there is none."""
    is_slower = best.measurement is None and best.predicted_s > single.predicted_s * (
        1 + NO_HEADROOM
    )
    if best.is_single and not is_slower:
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
    runs, of_single = best.measurement, single.measurement
    if runs is None or of_single is None:
        ratio = ratio_of(single.predicted_s, best.predicted_s)
        return f"{_compared(ratio, _described(single))}, predicted."
    ratio = ratio_of(of_single.step_s(contended=contended), runs.step_s(contended=contended))
    how = f"by {CPU_CLOCK}" if contended else "measured"
    return f"{_compared(ratio, _described(single))}, {how}."


def _compared(ratio: float, than: str) -> str:
    return f"{ratio:.2f}x faster than {than}" if ratio >= 1 else f"{ratio:.2f}x as fast as {than}"


def undecided(best: Candidate, other: Candidate | None) -> str:
    """Return that the clocks disagree whether the best is faster, "" if they agree.

    They do not where one of them has no direction, since both candidates are within noise.
    """
    if other is None or best.measurement is None or other.measurement is None:
        return ""
    one, two = best.measurement, other.measurement
    if tied(one, two, contended=True) or tied(one, two, contended=False):
        return ""
    by_cpu = ratio_of(two.cpu_clock_median_s, one.cpu_clock_median_s)
    by_wall = ratio_of(two.median_s, one.median_s)
    return clocks_disagree(by_cpu, by_wall, _described(other))


def clocks_disagree(by_cpu: float, by_wall: float, than: str) -> str:
    """Return that one clock has a speed-up over ``than``, the other none; "" if they agree."""
    if (by_cpu - 1) * (by_wall - 1) >= 0:
        return ""
    clocks = [CPU_CLOCK, "the wall clock"]
    if by_wall > by_cpu:
        clocks.reverse()
    return (
        f"Undecided: it is faster than {than} by {clocks[0]} but slower by {clocks[1]}, since this "
        "machine was busy: run again when `placer machine` says good."
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


def is_undecided(best: Candidate, fastest: Candidate | None, *, contended: bool) -> bool:
    """Return whether a placement was faster than the unplaced model, the best, but within noise.

    By as little as no headroom it gains nothing, and on the same device nothing is placed either.
    """
    if not best.is_unplaced or fastest is None:
        return False
    runs, of_unplaced = fastest.measurement, best.measurement
    if runs is None or of_unplaced is None or not tied(runs, of_unplaced, contended=contended):
        return False
    ratio = ratio_of(runs.step_s(contended=contended), of_unplaced.step_s(contended=contended))
    is_elsewhere = fastest.placement.used_devices != best.placement.used_devices
    return is_elsewhere and ratio < 1 - NO_HEADROOM


def leave_unplaced(
    unplaced: Candidate, fastest: Candidate | None, *, contended: bool, is_short: bool
) -> str:
    """Return whether a placement may gain anything over the unplaced model, and how much.

    ``is_short`` tells that rounds were few for want of time.
    """
    [device] = unplaced.placement.used_devices
    where = f", on {device}" if len(unplaced.placement.device_names) > 1 else ""
    leave = f"leave the model unplaced{where}"
    nothing = f"Nothing to gain: {leave}."
    if fastest is None or fastest.measurement is None or unplaced.measurement is None:
        return nothing
    ratio = ratio_of(
        fastest.measurement.step_s(contended=contended),
        unplaced.measurement.step_s(contended=contended),
    )
    took = f"{fastest.name} took {ratio:.2f}x as long"
    if is_undecided(unplaced, fastest, contended=contended):
        longer = "measure longer (--measure-budget)"
        again = longer if is_short else "measure again on a quieter machine"
        rounds = round_count(fastest.measurement)
        return f"Undecided: {leave}, or {again}: {took}, which {rounds} cannot tell from noise."
    if tied(fastest.measurement, unplaced.measurement, contended=contended):
        return f"{nothing} No placement is faster by more than noise: {took}."
    return f"{nothing} It is {ratio:.2f}x faster than the fastest placement, {fastest.name}."


def only_unplaced(best: Candidate, others: Sequence[Candidate], *, contended: bool) -> str:
    """Return where to leave a model unplaced whose ops cannot be placed, and what that gains.

    Over torch's threads only if both were run: on a busy machine their times are far too long.
    """
    [device] = best.placement.used_devices
    leave = f"Leave the model unplaced, on {device}"
    best_s = best.ranking_s(contended=contended)
    slower = [
        f"{ratio_of(each.ranking_s(contended=contended), best_s):.2f}x faster than "
        + ("with torch's threads " if each.is_on_threads else "")
        + f"on {name}"
        for each in others
        if each.can_run and each.is_comparable(contended=contended)
        if best.measurement is not None or not each.is_on_threads
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


def _described(candidate: Candidate) -> str:
    """Return what a candidate is, as in "faster than core:0"."""
    if candidate.is_unplaced:
        return unplaced_model(candidate)
    names = candidate.placement.device_names
    return names[candidate.devices[0]] if candidate.is_single else candidate.name


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
