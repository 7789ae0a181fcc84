"""What is said of how long an optimization takes, before and after it."""

from __future__ import annotations

import pytest

from placer.cli.duration import duration, foretold, taken
from placer.report.progress import Timed
from placer.search.budget import Budget


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.3, "0.3 s"),
        (9.96, "9.96 s"),
        (59.44, "59.4 s"),
        (89.0, "89 s"),
        (300.0, "5 min"),
        (86400.0, "24 h"),
    ],
)
def test_a_duration_has_a_unit_that_fits(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_all_parts_are_foretold_and_add_up() -> None:
    told = foretold(Budget(seconds=20.0), is_model=True, is_run=True)
    assert told.startswith("This takes about 55 s in all on a quiet machine: search 20 s; ")
    assert "up to 20 s" in told
    assert "running the best 15 s" in told
    assert foretold(Budget(seconds=20.0), is_model=True, is_run=False).startswith(
        "This takes about 40 s in all on a quiet machine: search 20 s; "
    )


def test_evaluations_take_as_long_as_they_take() -> None:
    told = foretold(Budget(evaluations=400), is_model=True, is_run=True)
    assert told.startswith("This takes about 35 s on a quiet machine and the search, 400e: ")
    assert foretold(Budget(evaluations=400), is_model=False, is_run=False) == (
        "This takes as long as the search, 400e."
    )


def test_what_was_taken_is_told_by_stages_and_short_ones_together() -> None:
    stages_s = {"Loading the model": 0.3, "Extracting the graph": 20.0, "Compiling (once)": 30.0}
    assert taken(60.0, stages_s) == (
        "took 60 s: extracting the graph 20 s, compiling 30 s, the rest 10 s"
    )
    assert taken(1.0, {}) == "took 1 s: the rest 1 s"


def test_stages_are_timed_and_handed_on() -> None:
    heard: list[tuple[object, ...]] = []

    class Listener:
        def stage(self, title: str) -> None:
            heard.append((title,))

        def advance(self, share: float, text: str = "") -> None:
            heard.append((share, text))

    timed = Timed(Listener())
    timed.stage("one")
    timed.advance(0.5, "half")
    timed.stage("two")
    timed.stage("one")
    before = dict(timed.took_s)
    timed.complete()
    timed.complete()
    assert heard == [("one",), (0.5, "half"), ("two",), ("one",)]
    assert list(timed.took_s) == ["one", "two"]
    assert timed.took_s["two"] == before["two"]
    assert timed.took_s["one"] > before["one"] > 0
