from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.hardware.units import UNITS, milliseconds, parse_bytes, parse_limits, ratio_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("1KiB", 1024),
        ("0.1TiB", 109951162777),
        ("7", 7),
        (" 7B ", 7),
        ("0GB", 0),
    ],
)
def test_sizes_by_hand(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@given(st.integers(0, 10**15), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_any_unit_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * UNITS[unit]


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1e3MB", "8gib", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_limits_of_devices() -> None:
    assert parse_limits("cuda:0=8GiB, cpu=64GB") == {"cuda:0": 8 * 2**30, "cpu": 64 * 10**9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8GiB", "'8GiB' is no limit"),
        ("", "is no limit"),
        ("cpu=lots", "'lots' is no size"),
        ("cpu=1GB,cpu=2GB", "cpu has two limits"),
    ],
)
def test_what_is_no_limit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_limits(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.026, "26.00"),
        (0.35214, "352.1"),
        (0.0099996, "10.00"),
        (0.999_96, "1000"),
        (3e-9, "0.000003"),
        (0.0, "0"),
    ],
)
def test_times_have_four_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_steps_without_a_time_have_ratios_too() -> None:
    assert [ratio_of(3.0, 2.0), ratio_of(0.0, 0.0), ratio_of(1.0, 0.0)] == [1.5, 1.0, math.inf]
