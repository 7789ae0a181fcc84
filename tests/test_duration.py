"""What is said of how long an optimization takes, before and after it."""

from __future__ import annotations

import pytest

from placer.cli.duration import duration, foretold, taken
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
    assert told.startswith("This takes about 55 s in all: search 20 s; ")
    assert "up to 20 s" in told
    assert "running the best 15 s" in told
    assert foretold(Budget(seconds=20.0), is_model=True, is_run=False).startswith(
        "This takes about 40 s in all: search 20 s; "
    )


def test_evaluations_take_as_long_as_they_take() -> None:
    told = foretold(Budget(evaluations=400), is_model=True, is_run=True)
    assert told.startswith("This takes about 35 s and the search, 400e: ")
    assert foretold(Budget(evaluations=400), is_model=False, is_run=False) == (
        "This takes as long as the search, 400e."
    )


def test_what_was_taken_is_told_by_parts_and_measuring_only_if_there_was_any() -> None:
    assert taken(60.0, search_s=20.0, measuring_s=30.0) == (
        "took 60 s: search 20 s, running the best 30 s, the rest 10 s"
    )
    assert taken(21.0, search_s=20.0) == "took 21 s: search 20 s, the rest 1 s"
