"""Number of digits of displayed times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.milliseconds import milliseconds, ratio_of


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.026, "26.00"),
        (0.35214, "352.1"),
        (0.0099996, "10.00"),
        (0.999_96, "1000"),
        (3e-9, "0.000003"),
        (0.0, "0"),
    ],
)
def test_times_have_four_digits(seconds: float, told: str) -> None:
    assert milliseconds(seconds) == told


@given(seconds=st.floats(1e-6, 1e4))
def test_what_is_told_is_what_was_given_to_four_digits(seconds: float) -> None:
    told = milliseconds(seconds)
    assert float(told) == pytest.approx(seconds * 1e3, rel=5.001e-4)
    assert len(told.replace(".", "").lstrip("0")) >= 4


def test_steps_without_a_time_have_ratios_too() -> None:
    assert [ratio_of(3.0, 2.0), ratio_of(0.0, 0.0), ratio_of(1.0, 0.0)] == [1.5, 1.0, math.inf]
