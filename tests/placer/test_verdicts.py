"""The verdict of a result against the unplaced model, on quiet and on busy machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.measurement import Measurement
from placer.choose import choose, finalists, worth_running
from placer.result import Result
from placer.search.candidate import Candidate
from tests.helpers.made_candidates import (
    HEFT,
    PAIR,
    SINGLE,
    busy,
    by_clocks,
    candidate,
    failed,
    result_of,
    unplaced,
)

TOO_BUSY_FOR_THREADS = (
    "Undecided against the unplaced model with torch's threads on the same cores: the machine is "
    "too busy to compare."
)


def test_of_two_unplaced_models_the_faster_one_counts() -> None:
    alone, joined = unplaced("core:0", 1.0), unplaced("core:0-1", 1.5)
    slow, single = candidate(HEFT, 1.0, [1.1] * 3), candidate(SINGLE, 1.0, [3.0] * 3)
    both = [joined, alone, slow, single]
    assert choose(both) is alone
    assert finalists(both) == [slow, alone], "a program slower than its model is no baseline"
    result = result_of(both)
    assert result.unplaced is result.single is alone
    assert result.speedup_of(slow) == pytest.approx(1 / 1.1)
    fast = candidate(HEFT, 1.0, [0.5] * 3)
    assert choose([joined, alone, fast, single]) is fast
    alone, joined = unplaced("core:0", 1.5), unplaced("core:0-1", 1.0)
    result = result_of([joined, alone, slow, single])
    assert result.best is result.unplaced is joined
    assert result.single is alone, "torch's threads on both cores are no single device"
    assert result.speedup == 1.5


def test_on_a_busy_machine_the_unplaced_model_on_one_core_is_compared_by_its_cpu_clock() -> None:
    alone, joined = unplaced("core:0", 4.0, cpu_clock_s=2.0), unplaced("core:0-1", 1.0)
    placed, single = busy(HEFT, 1.5), busy(SINGLE, 3.0)
    result = result_of([joined, alone, placed, single])
    assert result.contended
    assert result.best is placed
    assert result.single is result.unplaced is alone
    assert result.speedup == pytest.approx(2.0 / 1.5)
    assert result.verdict == (
        f"1.33x faster than the unplaced model on core:0, by CPU-clock time. {TOO_BUSY_FOR_THREADS}"
    )
    assert not any("within noise" in remark for remark in result.remarks)
    assert np.isnan(result.speedup_of(joined))
    assert choose([joined, alone, busy(HEFT, 2.5), single]) is alone
    assert choose([joined, alone]) is joined, "without a placement wall times decide"
    [remark] = [each for each in result_of([joined, alone]).remarks if "was busy" in each]
    assert "only wall times" in remark


def test_the_verdict_judges_torchs_threads_beside_the_model_on_one_core() -> None:
    alone, joined = unplaced("core:0", 2.0), unplaced("core:0-1", 1.5)
    placed, single = candidate(HEFT, 1.0, [1.0] * 3), candidate(SINGLE, 1.0, [3.0] * 3)
    gain = "2.00x faster than the unplaced model on core:0, measured."
    undecided = (
        "Undecided against the unplaced model with torch's threads on the same cores, which could "
        "not be run."
    )
    assert result_of([failed(joined), alone, placed, single]).verdict == f"{gain} {undecided}"
    slower = replace(joined, eliminated=True)
    assert result_of([slower, alone, placed, single]).verdict == gain
    best_alone = result_of([failed(joined), alone, candidate(HEFT, 1.0, [3.0] * 3)])
    assert best_alone.verdict == (
        "Nothing to gain: leave the model unplaced. It is 1.50x faster than the fastest placement, "
        f"HEFT. {undecided}"
    )
    without_placements = result_of([failed(joined), alone])
    assert without_placements.verdict == f"Leave the model unplaced, on core:0. {undecided}"


def test_on_a_busy_machine_torchs_threads_stay_undecided_whichever_model_is_the_baseline() -> None:
    joined, placed = unplaced("core:0-1", 1.0), busy(HEFT, 1.5)
    slow_alone = unplaced("core:0", 8.0, cpu_clock_s=4.0)
    result = result_of([joined, slow_alone, placed, busy(SINGLE, 3.0)])
    assert result.verdict == f"2.00x faster than a, by CPU-clock time. {TOO_BUSY_FOR_THREADS}"
    alone = unplaced("core:0", 2.0, cpu_clock_s=1.0)
    assert result_of([joined, alone, placed]).verdict.endswith(f"HEFT. {TOO_BUSY_FOR_THREADS}")


@pytest.mark.parametrize(
    ("baseline", "name"),
    [
        (candidate(SINGLE, 1.0), "a"),
        (unplaced("core:0", 1.0), "the unplaced model on core:0"),
    ],
)
def test_clocks_that_disagree_on_a_busy_machine_decide_nothing(
    baseline: Candidate, name: str
) -> None:
    def result(cpu_clock_s: float, wall_s: float) -> Result:
        return result_of(
            [by_clocks(candidate(HEFT, 1.0), 1.0, 4.0), by_clocks(baseline, cpu_clock_s, wall_s)]
        )

    assert result(1.5, 5.0).verdict == f"1.50x faster than {name}, by CPU-clock time."
    assert result(1.5, 3.0).verdict == (
        f"Undecided: it is faster than {name} by CPU-clock time but slower by the wall clock, "
        "since this machine was busy: run again when `placer machine` says good."
    )


def test_clocks_do_not_disagree_where_wall_times_are_within_noise() -> None:
    walls_s = np.array([4.5, 3.6, 4.004, 5.1, 3.0]), np.array([3.0, 5.0, 4.0, 3.5, 4.5])
    best, single = (
        replace(
            candidate(kind, 1.0),
            measurement=Measurement(wall_s=wall_s, cpu_clock_s=np.full(5, cpu_clock_s)),
        )
        for kind, wall_s, cpu_clock_s in zip((HEFT, SINGLE), walls_s, (1.0, 1.5), strict=True)
    )
    assert result_of([best, single]).verdict == "1.50x faster than a, by CPU-clock time."


def test_threads_without_a_cpu_clock_are_compared_by_the_wall_clock() -> None:
    threads = by_clocks(unplaced("core:0-1", 1.0), 4.0, 4.0)
    result = result_of([threads, by_clocks(candidate(HEFT, 1.0), 3.0, 6.0)])
    assert result.contended
    assert "It is 1.50x faster than the fastest placement, HEFT." in result.verdict


def test_the_unplaced_model_is_left_on_a_busy_machine_only_if_the_clocks_agree() -> None:
    def result(wall_s: float, cpu_clock_s: float = 2.0) -> Result:
        placed = by_clocks(candidate(HEFT, 1.0), cpu_clock_s, wall_s)
        return result_of([by_clocks(unplaced("core:0", 1.0), 1.0, 4.0), placed])

    assert "It is 2.00x faster than the fastest placement, HEFT." in result(5.0).verdict
    assert result(3.0).verdict.startswith("Undecided: it is faster than HEFT by CPU-clock time but")
    assert "took 1.00x as long" in result(5.0, 0.999).verdict


def left_unplaced(
    placed_s: list[float], unplaced_s: list[float], *, unconfirmed: bool = False
) -> Result:
    """Return a result where the unplaced model on core:0 wins against HEFT."""
    times = np.array(unplaced_s)
    alone = unplaced("core:0", 1.0)
    alone = replace(alone, measurement=Measurement(wall_s=times, cpu_clock_s=times))
    result = result_of([alone, candidate(HEFT, 1.0, placed_s)])
    assert result.best is alone
    return replace(result, unconfirmed=unconfirmed)


LEAVE = "leave the model unplaced"
NOISY_ROUNDS = [0.97, 1.06, 0.9, 0.92, 1.0], [1.0] * 5


def test_a_placement_that_was_faster_within_noise_is_undecided_not_nothing() -> None:
    assert left_unplaced([0.87], [1.0], unconfirmed=True).verdict == (
        f"Undecided: {LEAVE}, or measure longer (--measure-budget): HEFT took 0.87x as long, which "
        "one round cannot tell from noise."
    )
    assert left_unplaced(*NOISY_ROUNDS).verdict == (
        f"Undecided: {LEAVE}, or measure again on a quieter machine: HEFT took 0.97x as long, "
        "which 5 rounds cannot tell from noise."
    )


@pytest.mark.parametrize(("placed_s", "shown"), [(1.0, "1.00"), (1.1, "1.10"), (0.99, "0.99")])
def test_a_placement_that_was_not_faster_gains_nothing(placed_s: float, shown: str) -> None:
    assert left_unplaced([placed_s], [1.0], unconfirmed=True).verdict == (
        f"Nothing to gain: {LEAVE}. No placement is faster by more than noise: HEFT took {shown}x "
        "as long."
    )


def test_the_model_and_its_program_on_one_core_are_one_answer() -> None:
    """Neither is placed: it is not undecided which of them, whatever clocks and rounds say."""
    single = by_clocks(candidate(SINGLE, 1.0), 1.5, 3.0)
    result = result_of([by_clocks(unplaced("a", 1.0), 1.0, 4.0), single])
    assert result.contended
    assert result.verdict == (
        f"Nothing to gain: {LEAVE}. It is 1.50x faster than the fastest placement, single device."
    )
    split = by_clocks(candidate(HEFT, 1.0), 2.0, 3.0)
    result = result_of([by_clocks(unplaced("a", 1.0), 1.0, 4.0), single, split])
    assert result.verdict.startswith("Undecided: it is faster than HEFT by CPU-clock time but")
    result = result_of([unplaced("a", 1.0), candidate(SINGLE, 1.0, [0.9, 1.0, 0.95])])
    assert result.best.is_unplaced
    assert result.verdict.startswith(f"Nothing to gain: {LEAVE}. No placement is faster by more")


def test_where_no_op_can_be_placed_the_verdict_says_where_to_leave_the_model() -> None:
    result = result_of([unplaced("core:0-1", 1.0), unplaced("core:0", 1.5)])
    assert result.verdict == (
        "Leave the model unplaced, on core:0-1: 1.50x faster than on core:0, measured."
    )
    result = result_of([unplaced("core:0-1", 1.5), unplaced("core:0", 1.0)])
    assert result.verdict == (
        "Leave the model unplaced, on core:0: 1.50x faster than with torch's threads on core:0-1, "
        "measured."
    )
    assert result_of([unplaced("core:0", 1.5)]).verdict == "Leave the model unplaced, on core:0."
    assert worth_running([unplaced("core:0", 1.5)], PAIR) == [0]
    predicted = replace(unplaced("core:0", 1.5), measurement=None)
    assert choose([predicted]) is predicted
    on_threads = replace(unplaced("core:0-1", 1.5), measurement=None)
    verdict = result_of([predicted, on_threads]).verdict
    assert verdict == "Leave the model unplaced, on core:0."


def test_a_remark_says_that_few_rounds_decided() -> None:
    result = result_of([candidate(HEFT, 1.0, [1.0, 1.0, 1.0]), candidate(SINGLE, 4.0)])
    said = replace(result, unconfirmed=True).remarks
    assert [each for each in said if each not in result.remarks] == [
        "Only 3 rounds decided: a longer --measure-budget makes the answer surer."
    ]
    slow = replace(result_of([busy(HEFT, 1.0), busy(SINGLE, 4.0)]), unconfirmed=True)
    few, was_busy = slow.remarks[:2]
    assert few.startswith("Only 3 rounds decided")
    assert was_busy.startswith("This machine was busy")
    undecided = left_unplaced([0.87], [1.0], unconfirmed=True)
    assert not undecided.remarks, "the verdict says it"
