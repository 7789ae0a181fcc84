"""Choice of the candidates to run and of the best, and sentences of a result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import placer
from envs.hardware.cluster import Cluster, Device
from envs.problem import Problem
from graphs.extract import extract
from placer.choose import MEASURED_CANDIDATES, PlacementError, choose, worth_running
from placer.search.candidate import Kind
from tests.helpers import tiny_models
from tests.helpers.made_candidates import (
    ANNEALING,
    HEFT,
    PAIR,
    SINGLE,
    SPLIT,
    TWO_OPS,
    UNPLACED,
    candidate,
    result_of,
    two_ops,
)

NOISY_HEFT, QUIET_SINGLE = [1.91, 2.30, 1.99], [2.00, 2.05, 2.01]
SIMPLER_TIE = {ANNEALING: [0.98, 1.30, 0.99], SPLIT: [1.02, 1.28, 0.98]}


@pytest.mark.parametrize(
    ("runs_s", "chosen"),
    [
        ({ANNEALING: [2.0, 2.1, 2.0], HEFT: [1.5, 1.6, 1.5], SINGLE: [3.0, 3.0, 3.1]}, HEFT),
        ({ANNEALING: [3.2, 3.1, 3.2], SINGLE: [3.0, 3.0, 3.0]}, SINGLE),
        ({ANNEALING: [1.0, 1.05, 0.99], SPLIT: [1.001, 1.04, 1.0], SINGLE: [3.0] * 3}, SPLIT),
        # the simpler of a tie is slower than one device
        ({**SIMPLER_TIE, SINGLE: [1.0, 1.31, 1.005]}, ANNEALING),
        (SIMPLER_TIE, SPLIT),
        # within noise of one device
        ({HEFT: NOISY_HEFT, SINGLE: QUIET_SINGLE}, SINGLE),
        ({ANNEALING: [1.9, 1.95, 1.92], HEFT: NOISY_HEFT, SINGLE: QUIET_SINGLE}, ANNEALING),
        # failed
        ({ANNEALING: [], SINGLE: [3.0, 3.0]}, SINGLE),
        ({Kind.OTHER: [1.0, 1.1, 1.0], ANNEALING: [1.0, 1.1, 1.0]}, ANNEALING),
        # the unplaced model: faster, within noise, slower, failed
        ({HEFT: [1.5] * 3, UNPLACED: [1.4] * 3, SINGLE: [3.0] * 3}, UNPLACED),
        ({HEFT: [1.5, 1.6, 1.5], UNPLACED: [1.52, 1.58, 1.51], SINGLE: [3.0] * 3}, UNPLACED),
        ({HEFT: [1.5] * 3, UNPLACED: [1.6] * 3, SINGLE: [3.0] * 3}, HEFT),
        ({HEFT: [1.5] * 3, UNPLACED: [], SINGLE: [3.0] * 3}, HEFT),
        ({SINGLE: [1.5] * 3, UNPLACED: [1.5] * 3}, UNPLACED),
    ],
)
def test_the_fastest_wins_and_the_simplest_of_a_tie(
    runs_s: dict[Kind, list[float]], chosen: Kind
) -> None:
    assert choose([candidate(kind, 1.0, times) for kind, times in runs_s.items()]).kind is chosen


def test_without_measurements_the_prediction_decides_and_then_simplicity() -> None:
    etf, annealing = candidate(Kind.ETF, 1.0), candidate(ANNEALING, 1.0)
    assert choose([annealing, etf, candidate(SINGLE, 2.0)]) is etf
    assert choose([candidate(Kind.OTHER, 1.0), annealing]) is annealing
    simplicity = [candidate(kind, 1.0).simplicity for kind in Kind]
    ranked = simplicity[: list(Kind).index(ANNEALING) + 1]
    assert ranked == sorted(set(ranked))
    assert choose([candidate(UNPLACED, 0.5), etf]) is etf, "it is an answer only where it was run"
    assert set(simplicity[len(ranked) :]) == {ranked[-1] + 1}


def test_where_nothing_can_run_the_error_has_the_nearest_reason() -> None:
    with pytest.raises(PlacementError, match="died"):
        choose([candidate(ANNEALING, 1.0, [])])
    shortfalls = {Kind.EVOLUTION: 0, SINGLE: 30, HEFT: 10, Kind.ETF: 20}
    candidates = [
        candidate(kind, np.inf, missing_bytes=missing, why=f"a lacks {missing} B.")
        for kind, missing in shortfalls.items()
    ]
    with pytest.raises(PlacementError, match="HEFT misses by least: a lacks 10 B"):
        choose(candidates)


def test_the_best_single_device_the_best_few_others_and_a_warm_start_are_run() -> None:
    candidates = [candidate(ANNEALING, 1.0 + i / 10) for i in range(4)]
    candidates += [candidate(HEFT, 2.0), candidate(Kind.ETF, 2.1)]
    candidates += [candidate(Kind.EVOLUTION, np.inf)]
    candidates += [candidate(SINGLE, predicted_s) for predicted_s in (3.1, 3.0)]
    assert worth_running(candidates, PAIR) == [8, 0, 1, 2, 3, 4]
    candidates += [
        candidate(kind, 9.0, name="warm start") for kind in (Kind.OTHER, Kind.WARM_START)
    ]
    assert MEASURED_CANDIDATES == 5
    assert worth_running(candidates, PAIR) == [8, 0, 1, 2, 3, 4, 10]


def test_a_result_is_plain_data_for_machines() -> None:
    candidates = [
        candidate(HEFT, 1.0, [1.0, 1.5, 2.0]),
        candidate(SINGLE, 2.0, []),
        candidate(Kind.ETF, np.inf, why="no room"),
        candidate(SINGLE, 4.0),
    ]
    data = result_of(candidates).with_times().to_dict()
    json.dumps(data, allow_nan=False)
    assert (data["best"], data["step_s"], data["measured"]["clock"]) == ("HEFT", 1.5, "wall")
    assert data["speed_up"] == 4.0
    assert "died" in " ".join(data["remarks"])
    heft, single, etf, other = data["candidates"]
    assert [one["name"] for one in data["candidates"] if one["chosen"]] == ["HEFT"]
    assert heft["measured"]["wall_median_s"] == 1.5
    assert heft["measured"]["wall_min_s"] == 1.0
    assert heft["measured"]["spread"] == pytest.approx(1 / 3)
    assert (heft["predicted_step_s"], heft["speed_up"]) == (1.0, 4.0)
    assert (single["measured"], single["why"]) == (None, "died")
    assert (etf["predicted_step_s"], etf["speed_up"], etf["why"]) == (None, None, "no room")
    assert (other["measured"], other["speed_up"], other["why"]) == (None, 1.0, "")


def test_a_single_device_that_failed_is_no_yardstick() -> None:
    candidates = [candidate(HEFT, 1.0, [1.0, 1.0, 1.0]), candidate(SINGLE, 2.0, [])]
    result = result_of(candidates)
    assert np.isnan(result.speedup)
    assert "died" in result.verdict
    assert len(result.remarks) == 1
    assert result_of([*candidates, candidate(SINGLE, 4.0)]).speedup == pytest.approx(4.0)


def test_remarks_say_what_is_impossible_scattered_and_wrongly_predicted() -> None:
    candidates = [
        candidate(HEFT, 0.5, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]),
        candidate(SINGLE, 4.0, [8.0] * 7),
    ]
    result = replace(result_of(candidates), lower_bound_s=2.0)
    impossible, scatter, wrong = result.remarks
    assert "2.00x" in impossible
    assert "100%" in scatter
    assert "0.50" in wrong
    assert result.main_remarks == [impossible, scatter]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("names", "hand_over_s", "applies"),
    [
        (("core:0", "core:1"), 0.0, True),
        (("core:0",), 0.0, True),
        (("core:0", "core:1"), 1e-4, False),  # it is in the measured step
        (("core:0-1",), 0.0, False),  # the unplaced model runs in this process
        (("cpu",), 0.0, False),
    ],
)
def test_a_remark_says_that_steps_were_run_without_their_hand_over(
    names: tuple[str, ...], hand_over_s: float, applies: bool
) -> None:
    graph = replace(TWO_OPS, hand_over_s=hand_over_s)
    devices = tuple(Device(name=name, kind="x", memory_bytes=10) for name in names)
    problem = Problem.of(graph, Cluster(name="here", devices=devices))
    measured = result_of([candidate(HEFT, 1.0, [1.0] * 3), candidate(SINGLE, 2.0, [2.0] * 3)])
    result = replace(measured, problem=problem, extraction=extract(tiny_models.tied_weights()))
    assert any("copy.deepcopy" in remark for remark in result.remarks) == applies
    simulated = replace(result_of([candidate(HEFT, 1.0), candidate(SINGLE, 2.0)]), problem=problem)
    assert not any("copy.deepcopy" in remark for remark in simulated.remarks)


def test_results_placements_and_clusters_are_small_tables_in_notebooks(tmp_path: Path) -> None:
    cluster = replace(PAIR, name="<pair>")
    result = placer.optimize(two_ops(), cluster, budget="10e", progress=False)
    for shown in (result, result.placement, result.problem.cluster):
        html = shown._repr_html_()
        assert html.startswith("<table>")
        assert html.endswith("</table>")
        assert "<pair>" not in html
        assert len(repr(shown)) < 1000
    assert "2.00x" in result._repr_html_()
    assert "&lt;pair&gt;" in cluster._repr_html_()
    result.report(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()
