"""The rows of the benchmark of slow networks say whether bars are kept."""

from __future__ import annotations

import pytest

from benchmarks.slow_network import PERIOD, PLANNED, predicted, row, size_bytes, table


@pytest.mark.parametrize(
    ("name", "step_s", "speed_ups", "bars"),
    [
        ("allreduce", 0.110, (0.5, 0.4), "within 15%: yes, 0 .. 0.7x: yes"),
        ("allreduce", 0.120, (0.8, 0.7), "within 15%: NO, 0 .. 0.7x: NO"),
        ("bmuf", 0.086, (1.5, 1.4), "within 15%: yes, 1.4 .. 2x: yes"),
        ("bmuf", 0.086, (1.5, 1.3), "within 15%: yes, 1.4 .. 2x: NO"),
        ("fp16", 0.100, (0.9, 0.8), "within 15%: yes"),
    ],
)
def test_a_row_tells_which_bars_are_kept(
    name: str, step_s: float, speed_ups: tuple[float, float], bars: str
) -> None:
    told = "x".join(f"{value:9.2f}" for value in speed_ups)
    assert row(name, step_s, 0.1, *speed_ups).endswith(f"{told}x  {bars}")


def test_fewer_bytes_are_predicted_to_take_less_until_coding_takes_more() -> None:
    free = predicted(0.01, 200.0, {})
    assert free["allreduce"] > free["fp16"] > free["bmuf"] > free["onebit"] > 0.01
    rate = size_bytes() / 0.02
    coded = predicted(0.01, 200.0, {"onebit": rate, "bmuf": rate})
    assert coded["onebit"] == pytest.approx(free["onebit"] + 0.02)
    assert coded["bmuf"] == pytest.approx(free["bmuf"] + 0.02 / PERIOD)
    assert coded["allreduce"] == free["allreduce"]


def test_the_table_has_the_fastest_round_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    expected = predicted(0.02, 200.0, {"onebit": 1e9})
    rounds = {name: [2 * step_s, step_s] for name, step_s in expected.items()}
    rates: list[dict[str, float | None]] = [{"onebit": 2e9}, {"onebit": 1e9}, {"onebit": 5e8}]
    every = [{name: rate.get(name) for name in PLANNED} for rate in rates]
    found = {
        "steps_s": {"one": [0.018, 0.02], "alone": [0.03, 0.02], **rounds},
        "coding_bytes_per_s": every,
    }
    rows = {own["sync"]: own for own in table(found, 200.0)}
    assert list(rows) == list(PLANNED)
    assert all(own["measured_s"] == pytest.approx(own["predicted_s"]) for own in rows.values())
    assert rows["onebit"]["coding_s"] == pytest.approx(size_bytes() / 1e9)
    assert rows["bmuf"]["speed_up"] == pytest.approx(0.04 / expected["bmuf"])
    assert rows["bmuf"]["speed_up_of_one"] == pytest.approx(0.036 / expected["bmuf"])
    assert "largest difference 0%" in capsys.readouterr().out
