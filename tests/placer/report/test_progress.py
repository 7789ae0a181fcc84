"""Progress on a terminal and elsewhere: the state of a stage and the time left."""

from __future__ import annotations

import time

import pytest

from placer.progress import Pace, PlainLines, told_left


@pytest.mark.parametrize(
    ("left_s", "told"), [(180.0, "3 min left"), (10.0, "10 s left"), (14400.0, "4.0 h left")]
)
def test_what_is_left_is_told_in_a_fitting_unit(left_s: float, told: str) -> None:
    assert told_left(left_s) == told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the fake clock that progress reads, as a list of one item."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_left_is_told_from_the_pace_of_a_stage(clock: list[float]) -> None:
    pace = Pace()
    assert pace.left(0.0) == ""
    clock[0] += 50.0  # while nothing was done
    assert pace.left(0.2) == ""
    clock[0] += 10.0
    assert pace.left(0.3) == ""  # one step is too little
    clock[0] += 10.0
    assert pace.left(0.4) == "60 s left"


@pytest.mark.parametrize("standing", [0, 3, 7])
def test_a_step_that_stands_still_for_a_minute_says_nothing_of_the_pace(
    clock: list[float], standing: int
) -> None:
    pace = Pace()
    pace.left(0.1)
    told = []
    for step in range(8):
        clock[0] += 60.0 if step == standing else 2.0
        told.append(pace.left(0.1 * (step + 2)))
    seconds = [float(text.split()[0]) for text in told if text]
    assert seconds == pytest.approx([2.0 * (8 - step) for step in range(1, 8)], abs=0.5)


def test_many_small_steps_are_taken_together(clock: list[float]) -> None:
    pace = Pace()
    for number in range(1, 501):
        clock[0] += 0.1 if number % 2 else 0.0
        told = pace.left(number / 1000)
    assert told == "25 s left"


def test_what_was_done_before_a_job_was_resumed_says_nothing_of_its_pace(
    clock: list[float],
) -> None:
    pace = Pace()
    assert pace.left(0.8) == ""
    clock[0] += 10.0
    assert pace.left(0.85) == ""
    clock[0] += 10.0
    assert pace.left(0.9) == "20 s left"
    assert pace.left(1.0) == ""


def test_lines_tell_share_time_left_and_what_is_going_on(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainLines() as progress:
        progress.stage("Searching")
        progress.advance(0.25, "annealing")
        clock[0] += 20.0
        progress.advance(0.5, "annealing")
        clock[0] += 20.0
        progress.advance(0.75, "annealing")
        progress.stage("Running")
        progress.advance(0.5)
        clock[0] += 15.0
        progress.advance(0.75)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Searching ...",
        "Searching: 50%, annealing",
        "Searching: 75%, 20 s left, annealing",
        "Searching: 40.0 s",
        "Running ...",
        "Running: 75%",
        "Running: 15.0 s",
    ]
