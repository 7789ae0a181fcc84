"""Tables of results on narrow terminals, with odd names, and of runs on a busy machine."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from envs.hardware.cluster import Cluster, Device, Link
from envs.measurement import Measurement
from envs.placement import MadeBy, Placement
from envs.problem import Problem
from graphs.graph import GraphArrays, add_op, new_graph
from placer.choose import choose
from placer.report.console import stdout_console
from placer.report.html import report_data
from placer.report.table import print_cluster, print_placement, print_result
from placer.result import Result
from placer.search.candidate import Candidate, Kind, Prediction
from tests.helpers.unplaced import with_unplaced


def cluster_of(names: tuple[str, ...]) -> Cluster:
    return Cluster(
        name="[/x] cluster",
        devices=tuple(Device(name=name, kind="core", memory_bytes=10**10) for name in names),
        links=(Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e9),),
    )


def result_on(names: tuple[str, ...]) -> Result:
    graph = new_graph("model[/home]")
    for i in range(4):
        add_op(graph, f"[/b]{i}", cost_s={"*": 0.1})
    arrays, cluster = GraphArrays.from_graph(graph), cluster_of(names)
    candidates = []
    for kind, name, devices, step_s in (
        (Kind.ANNEALING, "annealing", [0, 1, 0, 1], 0.3521),
        (Kind.SINGLE_DEVICE, f"single {names[0]}", [0] * 4, 0.5974),
        (Kind.SINGLE_DEVICE, f"single {names[1]}", [1] * 4, 0.5974),
    ):
        times = np.linspace(step_s, step_s * 1.02, 7)
        places, priority = np.array(devices, np.int32), np.arange(4.0)
        made_by = MadeBy(placer="[/b]me", version="1")
        prediction = Prediction(
            placement=Placement.of(arrays, cluster, places, priority, made_by),
            objective_s=step_s,
            peak_memory_bytes=dict.fromkeys(names, 194_400_000),
        )
        candidates.append(
            Candidate(
                kind=kind,
                name=name,
                devices=places,
                priority=priority,
                step_ns=round(step_s * 1e9),
                prediction=prediction,
                measurement=None if devices[0] else Measurement(wall_s=times, cpu_clock_s=times),
            )
        )
    best = choose(candidates)
    return Result(
        placement=best.placement,
        problem=Problem.of(arrays, cluster),
        candidates=tuple(candidates),
        best=best,
        lower_bound_s=0.29,
        search_s=1.0,
        stopped=False,
    )


def busy(result: Result, *slower: float) -> Result:
    """Return the result with the wall times of its candidates that many times their CPU clocks."""
    rows = tuple(
        replace(row, measurement=replace(runs, wall_s=runs.cpu_clock_s * ratio))
        for row, ratio in zip(result.candidates, slower, strict=False)
        if (runs := row.measurement) is not None
    )
    return replace(result, candidates=rows, best=rows[0])


def printed(result: Result, width: int, *, verbose: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    print_result(result, console, verbose=verbose)
    return out.getvalue()


def ratios(text: str) -> list[str]:
    return re.findall(r"([\d.]+) ?x", text)


@pytest.fixture
def quiet() -> Result:
    """Return a result on two cores that were not busy."""
    return result_on(("core:0", "core:1"))


def test_no_number_is_cut_on_eighty_columns() -> None:
    text = printed(result_on(tuple(f"core:{i}" for i in range(4))), 80)
    assert "\u2026" not in text
    for number in ("352.1", "597.4"):
        assert number in text
    assert text.count("194") >= 3 * 4


def test_tables_of_a_thousand_devices_are_short(quiet: Result) -> None:
    names = tuple(f"core:{i}" for i in range(1000))
    devices = tuple(Device(name=name, kind="core", memory_bytes=10**10) for name in names)
    problem = Problem.of(quiet.problem.graph, Cluster(name="wide", devices=devices))
    one = quiet.candidates[1].prediction
    assert one is not None
    single = [
        replace(
            quiet.candidates[1],
            name=f"single {name}",
            prediction=replace(
                one,
                objective_s=2 - i / 1000,
                peak_memory_bytes=dict.fromkeys(names, 100_000_000) | {name: 300_000_000},
            ),
            measurement=None,
        )
        for i, name in enumerate(names)
    ]
    rows = (replace(quiet.candidates[0], measurement=None), *single)
    wide = replace(quiet, problem=problem, candidates=rows, best=single[3])
    text = printed(wide, 200, verbose=True)
    assert len(text) < 3000
    shown = re.findall(r"^[ >]*single core:(\d+)", text, re.MULTILINE)
    assert shown == [str(i) for i in (3, *range(993, 1000))]
    assert "992 more" in text
    assert text.count("300 MB") == 8


def test_memory_of_a_placement_file_is_printed(
    quiet: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"step_s": 0.1, "peak_memory_bytes": {"core:0": size, "core:1": 101_000_000}}
        for size in (202_000_000, 246_000_000)
    ]
    shown = replace(quiet.placement, predicted=records[0], measured=records[1])
    print_placement(shown, stdout_console())
    text = capsys.readouterr().out
    assert "202 / 101 MB" in text
    assert "246 / 101 MB" in text


def test_a_candidate_has_no_room_only_where_memory_is_missing(quiet: Result) -> None:
    first, *_, last = quiet.candidates
    assert first.prediction is not None
    impossible = replace(first.prediction, objective_s=np.inf, why="no link joins these devices")
    unlinked = replace(impossible, peak_memory_bytes={"core:0": 0, "core:1": 0})
    for prediction, cells in (
        (replace(impossible, missing_bytes=5), ["no room", "-", "194 / 194 MB"]),
        (unlinked, ["-", "-", "-"]),
    ):
        row = replace(first, name="split", prediction=prediction, measurement=None)
        alone = replace(last, measurement=None)
        text = printed(replace(quiet, candidates=(row, alone), best=alone), 80)
        [line] = [line for line in text.splitlines() if "split" in line]
        assert re.split(r"\s{2,}", line.strip()) == ["split", *cells]


def test_names_from_files_are_text_and_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_on(("core:0", "[/red]"))
    console = stdout_console()
    print_result(result, console)
    print_placement(result.placement, console)
    print_cluster(result.problem.cluster, console)
    text = capsys.readouterr().out
    for name in ("model[/home]", "[/red]", "[/b]me", "[/x] cluster"):
        assert name in text


def test_the_verdict_compares_with_the_unplaced_step(
    quiet: Result,
) -> None:
    runs = Measurement(wall_s=np.full(7, 0.4), cpu_clock_s=np.full(7, 0.4))
    slower = with_unplaced(quiet, runs)
    assert ratios(quiet.verdict) == ["1.70"]
    assert ratios(slower.verdict) == ["1.70", "1.12"]
    failed = with_unplaced(quiet, replace(runs, failure="it died"))
    assert ratios(failed.verdict) == ["1.70"]
    assert "Undecided against the unplaced model" in failed.verdict
    assert failed.verdict.endswith(", which could not be run.")
    assert "unplaced failed: it died" in failed.remarks
    assert "  unplaced" in printed(slower, 100)
    assert slower.with_times().to_dict()["candidates"][-1]["speed_up"] == pytest.approx(
        1.51, abs=0.01
    )


@pytest.mark.parametrize(
    ("unplaced_s", "why"),
    [(0.25, "It is 1.42x faster"), (0.355, "by more than noise: annealing took 1.00x as long")],
)
def test_where_the_unplaced_model_wins_or_ties_the_verdict_says_to_leave_it(
    quiet: Result, unplaced_s: float, why: str
) -> None:
    times = np.full(7, unplaced_s)
    with_it = with_unplaced(quiet, Measurement(wall_s=times, cpu_clock_s=times))
    best = choose(with_it.candidates)
    assert best.is_unplaced
    left = replace(with_it, best=best, placement=best.placement).with_times()
    assert left.verdict.startswith("Nothing to gain: leave the model unplaced.")
    assert why in left.verdict
    assert set(left.placement.device_names) == {"core:0-1"}
    measured = left.placement.measured
    assert measured is not None
    assert measured["step_s"] == measured["unplaced_wall_median_s"] == unplaced_s


def test_the_chosen_row_is_marked_and_a_tie_is_called_one(quiet: Result) -> None:
    lines = printed(quiet, 900).splitlines()
    [marked] = [line for line in lines if "> ann" in line]
    assert "352.1" in marked
    assert lines[-1].startswith("Best: annealing")
    runs = quiet.best.measurement
    assert runs is not None
    ahead = replace(quiet.best, name="ETF", measurement=replace(runs, wall_s=runs.wall_s * 0.999))
    text = printed(replace(quiet, candidates=(ahead, *quiet.candidates)), 900)
    assert "within noise" in text


def test_a_busy_machine_counts_cpu_clock_times_and_shows_wall_times(quiet: Result) -> None:
    result = busy(quiet, 3.0, 2.0)
    assert ratios(result.verdict) == ["1.70"]
    assert any("CPU-clock time" in remark for remark in result.remarks)
    assert not any("CPU-clock" in remark for remark in quiet.remarks)
    data = report_data(result)
    [best] = [row["measured"] for row in data["candidates"] if row["best"]]
    assert best["min_s"] <= best["low_s"] <= best["step_s"] <= best["high_s"]
    assert best["wall_s"] == pytest.approx(3 * best["step_s"])
    assert (data["judged"], data["wall_s"]) == ("cpu-clock", best["wall_s"])
    runs = Measurement(wall_s=np.full(7, 0.6), cpu_clock_s=np.full(7, 0.6))
    assert "1067 ms" in printed(with_unplaced(result, runs), 800, verbose=True)


def test_a_busy_machine_compares_no_unplaced_step_and_says_how_busy_it_was(quiet: Result) -> None:
    runs = Measurement(wall_s=np.full(7, 0.01), cpu_clock_s=np.full(7, 0.01))
    result = with_unplaced(busy(quiet, 34.0, 30.0), runs)
    assert choose(result.candidates) is result.best
    assert "Undecided against the unplaced model" in result.verdict
    for contended, slower in ((result, ["32", "1.15"]), (busy(quiet, 34.0), ["34", "1.15"])):
        [remark] = [remark for remark in contended.remarks if "was busy" in remark]
        assert ratios(remark) == slower


def test_links_that_were_measured_on_a_busy_machine_are_named(quiet: Result) -> None:
    assert not any("links" in remark for remark in quiet.remarks)
    first, second = quiet.problem.cluster.devices
    cluster = replace(quiet.problem.cluster, devices=(first, replace(second, contention=28.4)))
    contended = replace(quiet, problem=Problem.of(quiet.problem.graph, cluster))
    [remark] = [remark for remark in contended.remarks if "links" in remark]
    assert "core:1 28.4 x" in remark


@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_both_clocks_of_a_placement_file_are_printed(
    quiet: Result, clock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"step_s": 0.05857, "clock": clock, "wall_median_s": 0.3199}
    print_placement(replace(quiet.placement, measured=measured), stdout_console())
    text = capsys.readouterr().out
    assert "58.57 ms" in text
    assert ("319.9 ms" in text) == (clock == "cpu")
