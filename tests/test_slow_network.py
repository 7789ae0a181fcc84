"""The rows of the benchmark of slow networks say whether bars are kept."""

from __future__ import annotations

import pytest

from benchmarks.slow_network import predicted, row


@pytest.mark.parametrize(
    ("name", "step_s", "speed_up", "bars"),
    [
        ("allreduce", 0.110, 0.5, "within 15%: yes, 0 .. 0.7x: yes"),
        ("allreduce", 0.120, 0.8, "within 15%: NO, 0 .. 0.7x: NO"),
        ("bmuf", 0.086, 1.3, "within 15%: yes, 1.4 .. 2x: NO"),
        ("fp16", 0.100, 0.9, "within 15%: yes"),
    ],
)
def test_a_row_tells_which_bars_are_kept(
    name: str, step_s: float, speed_up: float, bars: str
) -> None:
    assert row(name, step_s, 0.1, speed_up).endswith(f"{speed_up:.2f}x  {bars}")


def test_fewer_bytes_are_predicted_to_take_less() -> None:
    found = predicted(0.01, 200.0)
    assert found["allreduce"] > found["fp16"] > found["bmuf"] > found["onebit"] > 0.01
