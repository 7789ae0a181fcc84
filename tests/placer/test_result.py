"""Choice of the candidates to run and of the best, and sentences of a result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import placer
from envs.hardware.cluster import Cluster, Device
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from graphs.extract import extract
from graphs.graph import GraphArrays, add_op, new_graph
from placer.choose import MEASURED_CANDIDATES, PlacementError, choose, finalists, worth_running
from placer.result import Result
from placer.search.candidate import Candidate, Kind, Prediction
from tests.helpers import tiny_models
from tests.helpers.clusters import toy_pair

PAIR = toy_pair("a", "b")


def two_ops() -> placer.Graph:
    graph = new_graph("two")
    for op_id in ("x", "y"):
        add_op(graph, op_id, cost_s={"*": 1.0})
    return graph


TWO_OPS = GraphArrays.from_graph(two_ops())
ANNEALING, HEFT, SPLIT, SINGLE, UNPLACED = (
    Kind.ANNEALING,
    Kind.HEFT,
    Kind.LAYER_SPLIT,
    Kind.SINGLE_DEVICE,
    Kind.UNPLACED,
)


def candidate(
    kind: Kind,
    predicted_s: float,
    runs_s: list[float] | None = None,
    *,
    name: str = "",
    why: str = "a needs 2 B but has 1 B",
    missing_bytes: int = 0,
) -> Candidate:
    """Return a candidate of two ops with these measurements; CPU-clock time equals wall time."""
    devices = np.array((0, 0) if kind is Kind.SINGLE_DEVICE else (0, 1), np.int32)
    priority = np.array((1.0, 0.0))
    measurement = None
    if runs_s is not None:
        times = np.array(runs_s)
        measurement = Measurement(wall_s=times, cpu_clock_s=times, failure="" if runs_s else "died")
    return Candidate(
        kind=kind,
        name=name or kind.value,
        devices=devices,
        priority=priority,
        step_ns=0,
        prediction=Prediction(
            placement=Placement.of(TWO_OPS, PAIR, devices, priority),
            objective_s=predicted_s,
            peak_memory_bytes={"a": 1, "b": 1},
            why="" if np.isfinite(predicted_s) else why,
            missing_bytes=missing_bytes,
        ),
        measurement=measurement,
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


TOO_BUSY_FOR_THREADS = (
    "Undecided against the unplaced model with torch's threads on the same cores: the machine is "
    "too busy to compare."
)


def unplaced(device: str, wall_s: float, cpu_clock_s: float | None = None) -> Candidate:
    """Return the unplaced model on a core or several, with these times in three runs."""
    times = np.full(3, wall_s)
    whole = np.zeros(2, np.int32)
    cluster = Cluster(name="one", devices=(Device(name=device, kind="x", memory_bytes=10),))
    made = candidate(UNPLACED, 1.0, [wall_s] * 3, name=f"unplaced {device}")
    assert made.prediction is not None
    placement = Placement.of(TWO_OPS, cluster, whole, made.priority)
    return replace(
        made,
        devices=whole,
        prediction=replace(made.prediction, placement=replace(placement, unplaced=True)),
        measurement=Measurement(wall_s=times, cpu_clock_s=np.full(3, cpu_clock_s or wall_s)),
    )


def busy(kind: Kind, cpu_clock_s: float) -> Candidate:
    """Return a candidate that other processes slowed down to half of its speed."""
    made = candidate(kind, cpu_clock_s, [2 * cpu_clock_s] * 3)
    assert made.measurement is not None
    return replace(made, measurement=replace(made.measurement, cpu_clock_s=np.full(3, cpu_clock_s)))


def test_of_two_unplaced_models_the_faster_one_counts() -> None:
    alone, joined = unplaced("core:0", 1.0), unplaced("core:0-1", 1.5)
    slow, single = candidate(HEFT, 1.0, [1.1] * 3), candidate(SINGLE, 1.0, [3.0] * 3)
    both = [joined, alone, slow, single]
    assert choose(both) is alone
    assert finalists(both) == [slow, alone], "a program slower than its model is no baseline"
    result = result_of(both)
    assert result.unplaced is result.single is alone
    assert result.speedup_of(slow) == pytest.approx(1 / 1.1)
    fast = candidate(HEFT, 1.0, [0.5] * 3)
    assert choose([joined, alone, fast, single]) is fast
    alone, joined = unplaced("core:0", 1.5), unplaced("core:0-1", 1.0)
    result = result_of([joined, alone, slow, single])
    assert result.best is result.unplaced is joined
    assert result.single is alone, "torch's threads on both cores are no single device"
    assert result.speedup == 1.5


def test_on_a_busy_machine_the_unplaced_model_on_one_core_is_compared_by_its_cpu_clock() -> None:
    alone, joined = unplaced("core:0", 4.0, cpu_clock_s=2.0), unplaced("core:0-1", 1.0)
    placed, single = busy(HEFT, 1.5), busy(SINGLE, 3.0)
    result = result_of([joined, alone, placed, single])
    assert result.contended
    assert result.best is placed
    assert result.single is result.unplaced is alone
    assert result.speedup == pytest.approx(2.0 / 1.5)
    assert result.verdict == (
        f"1.33x faster than the unplaced model on core:0, by CPU-clock time. {TOO_BUSY_FOR_THREADS}"
    )
    assert not any("within noise" in remark for remark in result.remarks)
    assert np.isnan(result.speedup_of(joined))
    assert choose([joined, alone, busy(HEFT, 2.5), single]) is alone
    assert choose([joined, alone]) is joined, "without a placement wall times decide"
    [remark] = [each for each in result_of([joined, alone]).remarks if "was busy" in each]
    assert "only wall times" in remark


def failed(made: Candidate) -> Candidate:
    """Return a candidate that failed when it was run."""
    assert made.measurement is not None
    return replace(made, measurement=replace(made.measurement, failure="it died"))


def test_the_verdict_judges_torchs_threads_beside_the_model_on_one_core() -> None:
    alone, joined = unplaced("core:0", 2.0), unplaced("core:0-1", 1.5)
    placed, single = candidate(HEFT, 1.0, [1.0] * 3), candidate(SINGLE, 1.0, [3.0] * 3)
    gain = "2.00x faster than the unplaced model on core:0, measured."
    undecided = (
        "Undecided against the unplaced model with torch's threads on the same cores, which could "
        "not be run."
    )
    assert result_of([failed(joined), alone, placed, single]).verdict == f"{gain} {undecided}"
    slower = replace(joined, eliminated=True)
    assert result_of([slower, alone, placed, single]).verdict == gain
    best_alone = result_of([failed(joined), alone, candidate(HEFT, 1.0, [3.0] * 3)])
    assert best_alone.verdict == (
        "Nothing to gain: leave the model unplaced. It is 1.50x faster than the fastest placement, "
        f"HEFT. {undecided}"
    )
    without_placements = result_of([failed(joined), alone])
    assert without_placements.verdict == f"Leave the model unplaced, on core:0. {undecided}"


def test_on_a_busy_machine_torchs_threads_stay_undecided_whichever_model_is_the_baseline() -> None:
    joined, placed = unplaced("core:0-1", 1.0), busy(HEFT, 1.5)
    slow_alone = unplaced("core:0", 8.0, cpu_clock_s=4.0)
    result = result_of([joined, slow_alone, placed, busy(SINGLE, 3.0)])
    assert result.verdict == f"2.00x faster than a, by CPU-clock time. {TOO_BUSY_FOR_THREADS}"
    alone = unplaced("core:0", 2.0, cpu_clock_s=1.0)
    assert result_of([joined, alone, placed]).verdict.endswith(f"HEFT. {TOO_BUSY_FOR_THREADS}")


def by_clocks(made: Candidate, cpu_clock_s: float, wall_s: float) -> Candidate:
    """Return a candidate with these times in three runs."""
    measurement = Measurement(wall_s=np.full(3, wall_s), cpu_clock_s=np.full(3, cpu_clock_s))
    return replace(made, measurement=measurement)


@pytest.mark.parametrize(
    ("baseline", "name"),
    [
        (candidate(SINGLE, 1.0), "a"),
        (unplaced("core:0", 1.0), "the unplaced model on core:0"),
    ],
)
def test_clocks_that_disagree_on_a_busy_machine_decide_nothing(
    baseline: Candidate, name: str
) -> None:
    def result(cpu_clock_s: float, wall_s: float) -> Result:
        return result_of(
            [by_clocks(candidate(HEFT, 1.0), 1.0, 4.0), by_clocks(baseline, cpu_clock_s, wall_s)]
        )

    assert result(1.5, 5.0).verdict == f"1.50x faster than {name}, by CPU-clock time."
    assert result(1.5, 3.0).verdict == (
        f"Undecided: it is faster than {name} by CPU-clock time but slower by the wall clock, "
        "since this machine was busy: run again when `placer machine` says good."
    )


def test_clocks_do_not_disagree_where_wall_times_are_within_noise() -> None:
    walls_s = np.array([4.5, 3.6, 4.004, 5.1, 3.0]), np.array([3.0, 5.0, 4.0, 3.5, 4.5])
    best, single = (
        replace(
            candidate(kind, 1.0),
            measurement=Measurement(wall_s=wall_s, cpu_clock_s=np.full(5, cpu_clock_s)),
        )
        for kind, wall_s, cpu_clock_s in zip((HEFT, SINGLE), walls_s, (1.0, 1.5), strict=True)
    )
    assert result_of([best, single]).verdict == "1.50x faster than a, by CPU-clock time."


def test_threads_without_a_cpu_clock_are_compared_by_the_wall_clock() -> None:
    threads = by_clocks(unplaced("core:0-1", 1.0), 4.0, 4.0)
    result = result_of([threads, by_clocks(candidate(HEFT, 1.0), 3.0, 6.0)])
    assert result.contended
    assert "It is 1.50x faster than the fastest placement, HEFT." in result.verdict


def test_the_unplaced_model_is_left_on_a_busy_machine_only_if_the_clocks_agree() -> None:
    def result(wall_s: float, cpu_clock_s: float = 2.0) -> Result:
        placed = by_clocks(candidate(HEFT, 1.0), cpu_clock_s, wall_s)
        return result_of([by_clocks(unplaced("core:0", 1.0), 1.0, 4.0), placed])

    assert "It is 2.00x faster than the fastest placement, HEFT." in result(5.0).verdict
    assert result(3.0).verdict.startswith("Undecided: it is faster than HEFT by CPU-clock time but")
    assert "took 1.00x as long" in result(5.0, 0.999).verdict


def test_where_no_op_can_be_placed_the_verdict_says_where_to_leave_the_model() -> None:
    result = result_of([unplaced("core:0-1", 1.0), unplaced("core:0", 1.5)])
    assert result.verdict == (
        "Leave the model unplaced, on core:0-1: 1.50x faster than on core:0, measured."
    )
    result = result_of([unplaced("core:0-1", 1.5), unplaced("core:0", 1.0)])
    assert result.verdict == (
        "Leave the model unplaced, on core:0: 1.50x faster than with torch's threads on core:0-1, "
        "measured."
    )
    assert result_of([unplaced("core:0", 1.5)]).verdict == "Leave the model unplaced, on core:0."
    assert worth_running([unplaced("core:0", 1.5)], PAIR) == [0]
    predicted = replace(unplaced("core:0", 1.5), measurement=None)
    assert choose([predicted]) is predicted
    on_threads = replace(unplaced("core:0-1", 1.5), measurement=None)
    verdict = result_of([predicted, on_threads]).verdict
    assert verdict == "Leave the model unplaced, on core:0."


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


def result_of(candidates: list[Candidate]) -> Result:
    """Return a result of two ops with these candidates."""
    best = choose(candidates)
    return Result(
        placement=best.placement,
        problem=Problem.of(TWO_OPS, PAIR),
        candidates=tuple(candidates),
        best=best,
        lower_bound_s=1.0,
        search_s=0.0,
        stopped=False,
    )


def test_a_remark_says_that_few_rounds_decided() -> None:
    result = result_of([candidate(HEFT, 1.0, [1.0, 1.0, 1.0]), candidate(SINGLE, 4.0)])
    said = replace(result, unconfirmed=True).remarks
    assert [each for each in said if each not in result.remarks] == [
        "Only 3 rounds decided: a longer --measure-budget makes the answer surer."
    ]


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
