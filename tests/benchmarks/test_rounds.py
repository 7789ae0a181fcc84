"""Steps that are run in the same rounds, and their ties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.rounds import SLOW_ROUNDS, Contestant, compared, in_rounds, mark_ties
from envs.measured import Failure, TimedStep


def steps(name: str, seconds: Iterable[float], turns: list[str], rounds: int = 7) -> Contestant:
    """Return a step that takes these seconds, one after the other."""
    left = iter(seconds)

    def run() -> TimedStep:
        turns.append(name)
        return TimedStep(wall_s=next(left), peak_memory_bytes={"cuda:0": len(turns)})

    return Contestant(run, rounds)


def test_each_round_starts_with_another_and_slow_ones_have_the_first_rounds() -> None:
    turns: list[str] = []
    one, slow = steps("a", [1.0] * 7, turns), steps("b", [9.0] * 3, turns, SLOW_ROUNDS)
    measurements = in_rounds([one, slow])
    assert "".join(turns) == "ab" + "ba" + "ab" + "aaaa"
    assert [len(each.wall_s) for each in measurements] == [7, 3]
    assert measurements[0].peak_memory_bytes == {"cuda:0": 10}


def test_ties_are_judged_by_the_rounds_that_both_have() -> None:
    turns: list[str] = []
    drift = [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    fast, close, slow = drift, [1.001 * s for s in drift], [1.002, 2.004, 3.006]
    apart = [1.02 * s for s in drift]
    measurements = in_rounds(
        [
            steps("fast", fast, turns),
            steps("close", close, turns),
            steps("slow", slow, turns, SLOW_ROUNDS),
            steps("apart", apart, turns),
        ]
    )
    rows: list[dict[str, Any]] = [{} for _ in measurements]
    mark_ties(rows, measurements)
    # by the medians of all rounds the third took twice as long
    assert [row["tied_with_fastest"] for row in rows] == [True, True, True, False]


def test_a_failure_ends_the_turns_of_one_and_is_no_tie() -> None:
    turns: list[str] = []
    failing = Contestant(lambda: Failure(reason="out of memory", overfull=True))
    measurements = in_rounds([failing, steps("a", [1.0] * 7, turns)])
    rows: list[dict[str, Any]] = [{}, {}]
    mark_ties(rows, measurements)
    assert measurements[0].failure == "out of memory"
    assert measurements[0].overfull
    assert [row["tied_with_fastest"] for row in rows] == [False, True]
    mark_ties(rows[:1], measurements[:1])
    assert not rows[0]["tied_with_fastest"]


def test_two_steps_are_compared_in_turns_with_their_ratio_and_tie() -> None:
    turns: list[str] = []

    def step(name: str, seconds: float) -> float:
        turns.append(name)
        return seconds

    comparison = compared(
        {"in line": lambda: step("a", 1.0), "beside": lambda: step("b", 2.0)}, 15.0
    )
    assert "".join(turns) == "ababab" + "abbaabbaab"
    assert comparison["beside_over_in_line"] == 2.0
    assert not comparison["tied"]
    assert comparison["in line"]["repeats_s"] == [1.0] * 5
    assert compared({"a": lambda: 1.0, "b": lambda: 1.001}, 3.0)["tied"]
