"""Tables on narrow terminals and with odd names: numbers are not cut, names are not markup."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks.steps import Steps, step_table
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
        all_cores=Measurement(wall_s=times, cpu_clock_s=times),
    )


def printed_of(found: Result, width: int, *, verbose: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    print_result(found, console, verbose=verbose)
    return out.getvalue()


def test_no_number_is_cut_on_eighty_columns() -> None:
    text = printed_of(result_on(tuple(f"core:{i}" for i in range(4))), 80)
    assert "\u2026" not in text
    for number in ("352.1", "597.4"):
        assert number in text
    assert text.count("194") >= 3 * 4


def test_many_devices_have_no_rows_and_no_cells_of_their_own() -> None:
    names = tuple(f"core:{i}" for i in range(1000))
    found = result_on(names[:2])
    cluster = Cluster(
        name="wide",
        devices=tuple(Device(name=name, kind="core", memory_bytes=10**10) for name in names),
    )
    problem = Problem.of(found.problem.graph, cluster)
    one = found.candidates[1].prediction
    assert one is not None
    single = [
        replace(
            found.candidates[1],
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
    rows = (replace(found.candidates[0], measurement=None), *single)
    wide = replace(found, problem=problem, candidates=rows, best=single[3])
    text = printed_of(wide, 200, verbose=True)
    assert len(text) < 3000
    shown = re.findall(r"^[ >]*single core:(\d+)", text, re.MULTILINE)
    assert shown == [str(i) for i in (3, *range(993, 1000))]
    assert "992 more" in text
    assert text.count("300 MB") == 8


def test_names_from_files_are_text_and_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    found = result_on(("core:0", "[/red]"))
    console = stdout_console()
    print_result(found, console)
    print_placement(found.placement, console)
    print_cluster(found.problem.cluster, console)
    text = capsys.readouterr().out
    for name in ("model[/home]", "[/red]", "[/b]me", "[/x] cluster"):
        assert name in text


def test_the_verdict_compares_with_the_unplaced_step_by_shortest_and_median_times() -> None:
    slower = result_on(("core:0", "core:1"))
    quick = np.full(7, 0.2)
    faster = replace(slower, all_cores=Measurement(wall_s=quick, cpu_clock_s=quick))
    assert ratios(slower.verdict) == ["1.70x", "1.70x", "1.70x"]
    assert ratios(faster.verdict) == ["1.70x", "1.76x", "1.78x"]
    assert ratios(replace(slower, all_cores=slower.best.measurement).verdict) == ["1.70x"]
    failed = replace(slower.all_cores, failure="it died") if slower.all_cores else None
    assert ratios(replace(slower, all_cores=failed).verdict) == ["1.70x"]
    assert "not placed" in printed_of(faster, 100)


def ratios(verdict: str) -> list[str]:
    return re.findall(r"[\d.]+x", verdict)


def test_the_chosen_row_is_marked_and_why_it_is_chosen_is_told() -> None:
    found = result_on(("core:0", "core:1"))
    [marked] = [line for line in printed_of(found, 900).splitlines() if "> ann" in line]
    assert "352.1" in marked
    assert printed_of(found, 900).splitlines()[-1].startswith("Best: annealing")
    ahead = replace(found.candidates[0], name="ETF")
    runs = ahead.measurement
    assert runs is not None
    ahead = replace(ahead, measurement=replace(runs, wall_s=runs.wall_s * 0.999))
    text = printed_of(replace(found, candidates=(ahead, *found.candidates)), 900)
    assert "within noise" in text


def test_on_a_busy_machine_both_clocks_are_told_and_not_mixed() -> None:
    quiet = result_on(("core:0", "core:1"))
    rows = tuple(
        replace(row, measurement=replace(seen, wall_s=seen.wall_s * slower))
        for row, slower in zip(quiet.candidates, (3.0, 2.0, 2.0), strict=True)
        if (seen := row.measurement) is not None
    )
    found = replace(quiet, candidates=rows, best=rows[0], all_cores=None)
    assert ratios(found.verdict) == ["1.70x", "1.13x"]
    assert any("CPU-clock time" in remark for remark in found.remarks)
    assert not any("CPU-clock" in remark for remark in quiet.remarks)
    [best] = [row for row in report_data(found)["candidates"] if row["best"]]
    seen = best["measured"]
    assert seen["min_s"] <= seen["low_s"] <= seen["step_s"] <= seen["high_s"]
    assert seen["wall_s"] == pytest.approx(3 * seen["step_s"])
    data = report_data(found)
    assert (data["judged"], data["wall_s"]) == ("cpu-clock", seen["wall_s"])
    assert "1067 ms" in printed_of(replace(found, all_cores=quiet.all_cores), 800, verbose=True)


def test_a_busy_machine_judges_no_unplaced_step_and_says_how_busy_it_was() -> None:
    quiet = result_on(("core:0", "core:1"))
    rows = tuple(
        replace(row, measurement=replace(seen, wall_s=seen.cpu_clock_s * slower))
        for row, slower in zip(quiet.candidates, (34.0, 2.0, 1.0), strict=True)
        if (seen := row.measurement) is not None
    )
    found = replace(quiet, candidates=rows, best=rows[0])
    assert found.all_cores is not None
    assert len(ratios(found.verdict)) == 2
    [told] = [remark for remark in found.remarks if "was busy" in remark]
    assert re.findall(r"[\d.]+ x", told) == ["18 x", "2 x", "1.15 x"]
    [told] = [r for r in replace(found, candidates=rows[:1]).remarks if "was busy" in r]
    assert re.findall(r"[\d.]+ x", told) == ["34 x", "1.15 x"]


def test_links_that_were_measured_on_a_busy_machine_are_told() -> None:
    found = result_on(("core:0", "core:1"))
    assert not any("links" in remark for remark in found.remarks)
    first, second = found.problem.cluster.devices
    cluster = replace(found.problem.cluster, devices=(first, replace(second, contention=28.4)))
    problem = Problem.of(found.problem.graph, cluster)
    [told] = [remark for remark in replace(found, problem=problem).remarks if "links" in remark]
    assert "core:1 28.4 x" in told


def test_the_evidence_of_a_busy_machine_has_both_clocks() -> None:
    quiet = result_on(("core:0", "core:1"))
    table = step_table(Steps.of("m", quiet), "two cores")
    assert table.rows[0][2:4] == ("603.4", "355.6")
    rows = tuple(
        replace(row, measurement=replace(seen, wall_s=3 * seen.wall_s))
        for row in quiet.candidates
        if (seen := row.measurement) is not None
    )
    table = step_table(Steps.of("m", replace(quiet, candidates=rows, best=rows[0])), "two cores")
    assert table.rows[0][2:4] == ("603.4 (1810.1)", "355.6 (1066.9)")


def test_what_a_placement_file_keeps_of_both_clocks_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placement = result_on(("core:0", "core:1")).placement
    seen = {"step_s": 0.05857, "clock": "cpu", "wall_median_s": 0.3199}
    print_placement(replace(placement, measured=seen), stdout_console())
    told = capsys.readouterr().out
    assert "58.57 ms" in told
    assert "319.9 ms" in told
    print_placement(replace(placement, measured={**seen, "clock": "wall"}), stdout_console())
    told = capsys.readouterr().out
    assert "58.57 ms" in told
    assert "319.9 ms" not in told
