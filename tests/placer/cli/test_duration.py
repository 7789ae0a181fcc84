"""Messages about the duration of an optimization."""

from __future__ import annotations

import pytest

from placer.cli.talk import duration
from placer.progress import Timed


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.3, "0.3 s"),
        (59.44, "59.4 s"),
        (300.0, "5 min"),
        (86400.0, "24 h"),
    ],
)
def test_a_duration_has_a_unit_that_fits(seconds: float, told: str) -> None:
    assert duration(seconds) == told


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
