"""Statistics of measurements: medians, noise, ties and contention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.measurement import Measurement, contended, tied


def measurement(wall_s: list[float], cpu_s: list[float] | None = None) -> Measurement:
    return Measurement(wall_s=np.array(wall_s), cpu_clock_s=np.array(cpu_s or wall_s))


def test_the_numbers_of_a_measurement() -> None:
    seen = measurement([4.0, 2.0, 3.0, 10.0, 3.0], [2.0, 2.0, 2.0, 2.0, 3.0])
    assert seen.ok, seen.failure
    assert seen.counts
    assert seen.median_s == 3.0
    assert seen.min_s == 2.0
    assert seen.spread == pytest.approx((4 - 3) / 3)
    assert seen.cpu_clock_median_s == 2.0
    assert seen.contention == 1.5
    assert seen.step_s() == 3.0
    assert seen.step_s(contended=True) == 2.0


def test_a_failure_counts_as_infinitely_slow() -> None:
    failed = Measurement(wall_s=np.array([]), cpu_clock_s=np.array([]), failure="it died")
    assert failed.counts
    assert not failed.ok
    assert failed.median_s == failed.min_s == failed.step_s() == np.inf
    assert np.isnan(failed.spread)


def test_what_was_never_run_does_not_count() -> None:
    never = measurement([])
    assert not never.counts
    assert not never.ok


def test_the_machine_is_contended_by_the_median_of_all() -> None:
    quiet, busy = measurement([1.0], [0.99]), measurement([2.0], [1.0])
    assert not contended([])
    assert not contended([quiet, busy, quiet])
    assert contended([busy, busy, quiet])


def test_a_difference_in_every_round_is_no_tie_however_the_rounds_vary() -> None:
    slow = measurement([1.0, 5.0, 2.0, 9.0, 3.0])
    fast = measurement([0.9, 4.5, 1.8, 8.1, 2.7])
    assert not tied(slow, fast)
    assert not tied(fast, slow)


def test_noise_as_large_as_the_difference_is_a_tie() -> None:
    a = measurement([1.0, 1.3, 0.9, 1.2, 1.0, 1.1])
    b = measurement([1.1, 1.0, 1.2, 1.0, 0.9, 1.1])
    assert tied(a, b)
    assert tied(b, a)


def test_less_than_half_a_percent_is_a_tie_however_sure() -> None:
    a = measurement([1.0] * 9)
    assert tied(a, measurement([1.004] * 9))
    assert not tied(a, measurement([1.006] * 9))


def test_under_contention_cpu_clock_times_are_compared() -> None:
    a = measurement([1.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    b = measurement([2.0, 1.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert tied(a, b)
    assert not tied(a, b, contended=True)


def test_one_round_decides_only_where_the_difference_is_large() -> None:
    one = measurement([1.0])
    assert tied(one, measurement([1.2]))
    assert tied(measurement([1.2]), one)
    assert not tied(one, measurement([2.0]))
    assert not tied(measurement([2.0]), one)


def test_a_failure_ties_with_failures_only() -> None:
    failed = Measurement(wall_s=np.array([]), cpu_clock_s=np.array([]), failure="it died")
    assert tied(failed, failed)
    assert not tied(failed, measurement([1.0]))


def test_runs_of_two_nodes_are_not_compared() -> None:
    one = Measurement(wall_s=np.ones(3), cpu_clock_s=np.ones(3), node="10.0.0.5:9")
    assert tied(one, one)
    with pytest.raises(AssertionError, match="not compared"):
        tied(one, replace(one, node="10.0.0.6:9"))
