"""Progress on a terminal and elsewhere: the state of a stage and the time left."""

from __future__ import annotations

import time

import pytest

from placer.progress import Pace, PlainLines, Silent, TimedStages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the fake clock that progress reads, as a list of one item."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_left_follows_from_the_pace_of_a_stage(clock: list[float]) -> None:
    pace = Pace()
    assert pace.left(0.0) == ""
    clock[0] += 50.0  # while nothing was done
    assert pace.left(0.2) == ""
    clock[0] += 10.0
    assert pace.left(0.3) == ""  # one step is too little
    clock[0] += 10.0
    assert pace.left(0.4) == "60 s left"


@pytest.mark.parametrize("standing", [0, 3, 7])
def test_one_slow_step_does_not_change_the_pace(clock: list[float], standing: int) -> None:
    pace = Pace()
    pace.left(0.1)
    left = []
    for step in range(8):
        clock[0] += 60.0 if step == standing else 2.0
        left.append(pace.left(0.1 * (step + 2)))
    seconds = [float(text.split()[0]) for text in left if text]
    assert seconds == pytest.approx([2.0 * (8 - step) for step in range(1, 8)], abs=0.5)


def test_many_small_steps_are_taken_together(clock: list[float]) -> None:
    pace = Pace()
    for number in range(1, 501):
        clock[0] += 0.1 if number % 2 else 0.0
        left = pace.left(number / 1000)
    assert left == "25 s left"


def test_the_pace_of_a_resumed_job_is_that_after_its_resumption(clock: list[float]) -> None:
    pace = Pace()
    left = []
    for share in (0.8, 0.85, 0.9, 1.0):
        left.append(pace.left(share))
        clock[0] += 10.0
    assert left == ["", "", "20 s left", ""]


def test_lines_have_share_time_left_and_state(
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


def test_seconds_of_stages_add_up_until_the_job_ends(clock: list[float]) -> None:
    with TimedStages(Silent()) as progress:
        clock[0] += 1.0  # before the first stage
        for title, seconds in (("Searching", 2.0), ("Running", 3.0), ("Searching", 4.0)):
            progress.stage(title)
            progress.advance(0.5)
            clock[0] += seconds
    clock[0] += 5.0
    assert progress.seconds == {"Searching": 6.0, "Running": 3.0}
