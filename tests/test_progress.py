"""Progress on a terminal and elsewhere: how far a stage is, and how long it still takes."""

from __future__ import annotations

import time

import pytest

from placer.report.progress import Pace, PlainLines, time_left


@pytest.mark.parametrize(
    ("spent_s", "share", "told"),
    [
        (60.0, 0.25, "3 min left"),
        (10.0, 0.5, "10 s left"),
        (3600.0, 0.2, "4.0 h left"),
        (1.0, 0.0, ""),
        (5.0, 1.0, "0 s left"),
    ],
)
def test_what_is_left_is_told_in_a_fitting_unit(spent_s: float, share: float, told: str) -> None:
    assert time_left(spent_s, share) == told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress sees, in its only item."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_left_is_told_from_the_pace_of_a_stage(clock: list[float]) -> None:
    pace = Pace()
    assert pace.left(0.0) == ""
    clock[0] += 50.0  # while nothing was done
    assert pace.left(0.2) == ""
    clock[0] += 10.0
    assert pace.left(0.4) == "30 s left"


def test_what_was_done_before_a_job_was_resumed_says_nothing_of_its_pace(
    clock: list[float],
) -> None:
    pace = Pace()
    assert pace.left(0.8) == ""
    clock[0] += 10.0
    assert pace.left(0.9) == "10 s left"
    assert pace.left(1.0) == ""


def test_lines_tell_share_time_left_and_what_is_going_on(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainLines() as progress:
        progress.stage("Searching")
        progress.advance(0.25, "annealing")
        clock[0] += 20.0
        progress.advance(0.5, "annealing")
        progress.stage("Running")
        progress.advance(0.5)
        clock[0] += 15.0
        progress.advance(0.75)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Searching ...",
        "Searching: 50%, 40 s left, annealing",
        "Searching: 20.0 s",
        "Running ...",
        "Running: 75%, 15 s left",
        "Running: 15.0 s",
    ]
