"""Data of a report, compared with its schedule, and the commands that write it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import cluster_to_toml
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulated, Simulator
from envs.simulator.critical_path import critical_path
from graphs.graph import GraphArrays, add_op, new_graph
from graphs.graph_file import save_graph
from graphs.synthetic.sketches import transformer
from placer.cli.main import build_parser, main
from placer.evaluation import reviewed
from placer.job import SearchConfig
from placer.pipeline import optimize_problem
from placer.report.html import Source, next_commands, page, report_data
from placer.report.html.page import embedded
from placer.report.html.schedule import thinned, timeline_data
from placer.result import Result
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case
from tests.helpers.unplaced import with_unplaced


def placed(problem: Problem, seed: int = 0, **fields: Any) -> Placement:
    """Return a random placement that keeps groups together."""
    rng = np.random.default_rng(seed)
    unit = np.where(problem.graph.group < 0, np.arange(problem.op_count), -1 - problem.graph.group)
    devices = rng.integers(problem.device_count, size=problem.op_count).astype(np.int32)[unit]
    placement = Placement.of(problem.graph, problem.cluster, devices, rng.random(problem.op_count))
    return replace(placement, **fields)


def optimized(problem: Problem) -> Result:
    return optimize_problem(problem, SearchConfig(policy=None, budget="300e", measure=False))


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 10**7))
def test_the_timeline_is_the_schedule(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed, bad_places=False))
    schedule = Simulator(problem).run(devices, priority)
    placement = Placement.of(problem.graph, problem.cluster, devices, priority)
    if schedule.step_ns == INFEASIBLE_NS:
        with pytest.raises(ValueError, match="no report of a placement that cannot run"):
            timeline_data(Simulated(problem), placement)
        return
    shown = timeline_data(Simulated(problem), placement)
    assert shown["step_ns"] == schedule.step_ns
    assert shown["bars"]["op"] == list(range(problem.op_count))  # every op once
    assert shown["bars"]["start_ns"] == schedule.start_ns.tolist()
    assert shown["bars"]["end_ns"] == schedule.end_ns.tolist()
    path = critical_path(problem, schedule)
    critical = shown["critical"]
    assert critical["bar"] == [part.op for part in path]
    assert critical["end_ns"] == [part.end_ns for part in path]
    assert [critical["kinds"][kind] for kind in critical["kind"]] == [part.kind for part in path]
    assert (critical["start_ns"][0], critical["end_ns"][-1]) == (0, schedule.step_ns)
    assert critical["end_ns"][:-1] == critical["start_ns"][1:]
    idle = shown["idle"]
    for d in range(problem.device_count):
        busy = int((schedule.end_ns - schedule.start_ns)[schedule.devices == d].sum())
        waits = sum(
            end - start
            for of, start, end in zip(idle["device"], idle["start_ns"], idle["end_ns"], strict=True)
            if of == d
        )
        assert busy + waits == schedule.step_ns
    curves = shown["memory"]
    assert [curve["peak_bytes"] for curve in curves] == schedule.peak_bytes.tolist()
    assert [curve["limit_bytes"] for curve in curves] == problem.memory_bytes.tolist()
    on_tracks = [k for track in shown["tracks"] for k in track["transfers"]]
    assert set(on_tracks) == set(range(len(schedule.transfers)))


@given(seed=st.integers(0, 10**7))
@settings(max_examples=30)
def test_the_largest_of_a_memory_curve_is_the_simulated_peak(seed: int) -> None:
    problem = random_problem(seed, devices=1 + seed % 4)
    shown = timeline_data(Simulated(problem), placed(problem, seed))["memory"]
    assert [max(curve["bytes"]) for curve in shown] == [curve["peak_bytes"] for curve in shown]


@given(used=st.lists(st.integers(0, 100), min_size=1, max_size=200), most=st.integers(2, 50))
def test_a_thinned_curve_keeps_its_largest_and_its_last_value(used: list[int], most: int) -> None:
    curve = list(enumerate(used))
    kept = thinned(curve, most)
    assert len(kept) <= max(most, 2)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(curve)
    assert kept[-1] == curve[-1]
    assert max(value for _, value in kept) == max(used)


def test_every_op_and_edge_is_shown_as_the_problem_has_it() -> None:
    problem = random_problem(5, unequal=True)
    result = optimized(problem)
    shown = report_data(result)["ops"]
    assert shown["id"] == list(problem.graph.ids)
    assert [result.placement.device_names[d] for d in shown["device"]] == [
        result.device_of(op_id) for op_id in shown["id"]
    ]
    assert shown["cost_ns"] == [problem.cost_ns[i, d] for i, d in enumerate(shown["device"])]
    assert [shown["kinds"][k] for k in shown["kind"]] == list(problem.graph.ops)
    assert len(shown["source"]) == len(shown["target"]) == problem.graph.edge_count
    start, predecessors = problem.graph.predecessor_start, problem.graph.predecessors
    for u, v in zip(shown["source"], shown["target"], strict=True):
        assert u in predecessors[start[v] : start[v + 1]]


def test_candidates_have_their_predictions_quartiles_and_the_chosen_one() -> None:
    result = optimized(random_problem(6))
    times = np.arange(1.0, 10.0)
    names = result.problem.cluster.names
    runs = Measurement(wall_s=times, cpu_clock_s=times, peak_memory_bytes={names[0]: 123})
    failed = Measurement(wall_s=np.zeros(0), cpu_clock_s=np.zeros(0), failure="a worker died")
    best = replace(result.best, measurement=runs)
    rows = [best if row is result.best else row for row in result.candidates]
    rows[-1] = replace(rows[-1], measurement=failed)
    measured = with_unplaced(replace(result, candidates=tuple(rows), best=best), runs)
    data = report_data(measured)
    shown = {row["name"]: row for row in data["candidates"]}
    assert [row.name for row in rows] == list(shown)[:-1]
    assert [row["name"] for row in data["candidates"] if row["best"]] == [best.name]
    expected = {"step_s": 5.0, "wall_s": 5.0, "low_s": 3.0, "high_s": 7.0, "min_s": 1.0}
    assert shown[best.name]["measured"] == {**expected, "rounds": 9}
    assert shown[rows[-1].name]["measured"] is None
    assert shown[rows[-1].name]["why"] == "a worker died"
    assert shown["unplaced"]["measured"]["step_s"] == 5.0
    assert shown[best.name]["measured_memory_bytes"] == [123, None, None]
    assert shown[rows[-1].name]["measured_memory_bytes"] == [None] * 3
    assert (data["step_s"], data["judged"]) == (5.0, "measured")
    assert data["verdict"] == measured.verdict


def test_a_search_has_a_line_for_each_part() -> None:
    result = optimized(random_problem(7))
    lines = report_data(result)["search"]["lines"]
    assert {line["name"] for line in lines} >= {"heuristics", "evolution"}
    best_s = min(row.predicted_s for row in result.candidates)
    assert min(line["cost_s"][-1] for line in lines) == pytest.approx(best_s)
    for line in lines:
        assert len(line["evaluations"]) == len(line["seconds"]) == len(line["cost_s"])


def test_micro_batches_have_a_bar_for_every_copy() -> None:
    problem = random_problem(8, ops=10)
    placement = placed(problem, micro_batches=3)
    shown = report_data(reviewed(problem, placement))
    bars = shown["timeline"]["bars"]
    _, schedule = Simulated(problem).run(placement)
    assert len(bars["op"]) == len(schedule.start_ns) == 30
    assert sorted(zip(bars["op"], bars["batch"], strict=True)) == [
        (i, k) for i in range(10) for k in range(3)
    ]
    assert max(bars["end_ns"]) == shown["timeline"]["step_ns"]
    assert shown["step_s"] == shown["timeline"]["step_ns"] / 1e9


def test_a_placement_that_does_not_fit_has_no_step_time() -> None:
    problem = random_problem(9, memory_bytes=20_000_000)
    shown = report_data(reviewed(problem, placed(problem, devices=(0,) * problem.op_count)))
    assert shown["verdict"].startswith("It does not fit.")
    assert shown["step_s"] is None
    curve = shown["timeline"]["memory"][0]
    assert max(curve["bytes"]) > curve["limit_bytes"]


WALL = {"wall_median_s": 0.5, "wall_min_s": 0.45, "single_device_wall_min_s": 0.9}
RECORDED = {"step_s": 0.5, "single_device_step_s": 1.0, "spread": 0.1, "rounds": 7, **WALL}


def test_times_that_a_placement_file_records_are_shown() -> None:
    problem = random_problem(10)
    measured = {**RECORDED, "peak_memory_bytes": {problem.cluster.names[0]: 7_000_000}}
    data = report_data(reviewed(problem, placed(problem, measured=measured)))
    assert data["verdict"].startswith("2.00x faster")
    assert (data["step_s"], data["speed_up"], data["judged"]) == (0.5, 2.0, "measured")
    [best] = [row for row in data["candidates"] if row["best"]]
    [single] = [row for row in data["candidates"] if row["name"] == data["best_single"]]
    shown = ("step_s", "wall_s", "low_s", "high_s", "min_s", "rounds")
    assert [best["measured"][key] for key in shown] == [0.5, 0.5, 0.475, 0.525, 0.45, 7]
    assert [single["measured"][key] for key in shown] == [1.0, None, None, None, 0.9, None]
    for row in data["candidates"]:  # the others were not run and are compared by prediction
        assert row["speed_up_is"] == ("measured" if row in (best, single) else "predicted")
    assert data["speed_up_is"] == "measured"
    assert best["measured_memory_bytes"] == [7_000_000, None, None]


@pytest.mark.parametrize(
    ("of_single", "answer"),
    [
        ({}, "2.00x faster"),
        ({"single_device_wall_median_s": 2.5}, "2.00x faster"),
        ({"single_device_wall_median_s": 1.9}, "Undecided: "),
    ],
)
def test_recorded_cpu_clock_times_have_no_quartiles_of_the_wall_clock(
    of_single: dict[str, float], answer: str
) -> None:
    problem = random_problem(10)
    measured = {**RECORDED, "wall_median_s": 2.0, **of_single}
    data = report_data(reviewed(problem, placed(problem, measured=measured)))
    assert (data["judged"], data["wall_s"], data["speed_up"]) == ("cpu-clock", 2.0, 2.0)
    assert data["verdict"].startswith(answer)
    runs = [row["measured"] for row in data["candidates"] if row["measured"]]
    assert len(runs) == 2
    assert {run[key] for run in runs for key in ("low_s", "high_s", "min_s")} == {None}


def test_a_step_that_takes_no_time_is_shown() -> None:
    graph = new_graph("nothing")
    add_op(graph, "a", cost_s={"*": 0.0})
    problem = Problem.of(GraphArrays.from_graph(graph), one_kind(2))
    data = report_data(reviewed(problem, placed(problem)))
    assert (data["step_s"], data["speed_up"]) == (0.0, 1.0)


@pytest.mark.slow
def test_a_report_of_five_thousand_ops_stays_small() -> None:
    graph = GraphArrays.from_graph(transformer(layers=78))
    assert len(graph) >= 5000
    problem = Problem.of(graph, one_kind(4))
    assert len(page(report_data(reviewed(problem, placed(problem)))).encode()) < 2_000_000


@pytest.mark.slow
@settings(max_examples=50)
@given(name=st.text())
def test_no_name_ends_the_data_in_the_page(name: str) -> None:
    text = embedded({"id": [name]})
    assert "<" not in text
    assert json.loads(text) == {"id": [name]}


def data_of(path: Path) -> dict[str, Any]:
    text = path.read_text().partition('id="data">')[2].partition("</script>")[0]
    data: dict[str, Any] = json.loads(text)
    return data


@pytest.mark.parametrize("target", ["graph.json", "my model.py:build"])
@pytest.mark.parametrize("devices", [("core:0", "core:1"), ("cuda:0", "cpu")])
def test_the_command_line_accepts_every_suggested_command(
    target: str, devices: tuple[str, ...]
) -> None:
    source = Source(
        placement=Path("out/the placement.json"),
        target=target,
        devices=devices,
        place=["--cluster", "a cluster.toml"],
        model=[] if target == "graph.json" else ["--inference"],
        search=["--cluster", "a cluster.toml", "--pin", "embed=core:0"],
    )
    commands = [command.command for command in next_commands(source)]
    assert len(set(commands)) == len(commands) >= 4
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "placer"
        args = build_parser().parse_args(words)
        assert Path("out/the placement.json") in vars(args).values()


@pytest.mark.slow
def test_a_report_comes_with_an_optimization_and_again_from_its_placement(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    graph, cluster = files()
    out, first, second = (tmp_path / name for name in ("p.json", "first.html", "second.html"))
    arguments = [str(graph), "--cluster", str(cluster)]
    made = ["--budget", "300e", "--out", str(out), "--report", str(first)]
    assert main(["optimize", *arguments, *made]) == 0
    assert main(["show", str(out), "--html", str(second), "--target", *arguments]) == 0
    one, two = (data_of(path) for path in (first, second))
    for key in ("timeline", "ops", "step_s", "commands"):
        assert one[key] == two[key]
    assert one["search"]["lines"]
    assert not two["search"]["lines"]
    for command in one["commands"]:
        words = shlex.split(command["command"].replace("--budget 5m", "--budget 50e"))
        assert main(words[1:]) == 0


CUDA_PAIR = """
format = "placer-cluster/1"
[[device]]
name = "cuda:0"
kind = "gpu"
memory_bytes = 1_000_000_000
peak_flop_per_s = 1e9
bandwidth_bytes_per_s = 1e9
[[device]]
name = "cuda:1"
kind = "gpu"
memory_bytes = 1_000_000_000
peak_flop_per_s = 1e9
bandwidth_bytes_per_s = 1e9
[[link]]
between = ["cuda:0", "cuda:1"]
latency_s = 1e-9
bandwidth_bytes_per_s = 1e12
"""
TWO_LINEAR = """
import torch
from torch import nn

class TwoLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        return self.left(x) + self.right(x)

def build():
    return TwoLinear(), (torch.ones(256, 64), torch.ones(256, 64)), nn.MSELoss()
"""


@pytest.mark.slow
def test_the_first_command_of_a_trained_step_runs_it(tmp_path: Path) -> None:
    model, cluster, out, page = (tmp_path / name for name in ("m.py", "c.toml", "p.json", "1.html"))
    model.write_text(TWO_LINEAR)
    cluster.write_text(CUDA_PAIR)
    arguments = [f"{model}:build", "--cluster", str(cluster), "--out", str(out)]
    arguments += ["--budget", "50e", "--report", str(page)]
    assert main(["optimize", *arguments, "--optimizer", "adam"]) == 0
    first, *_ = data_of(page)["commands"]
    words = shlex.split(first["command"])
    assert words[:4] == ["torchrun", "--nproc-per-node=1", "-m", "placer.run"]
    args = build_parser().parse_args(["run", *words[4:]])
    assert (args.target, args.placement, args.optimizer) == (f"{model}:build", out, "adam")
    assert main(["optimize", *arguments, "--inference"]) == 0
    assert not any("placer.run" in command["command"] for command in data_of(page)["commands"])


def test_a_report_that_cannot_be_made_leaves_no_file(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    placement, out = tmp_path / "p.json", tmp_path / "report.html"
    made = ["--budget", "50e", "--out", str(placement)]
    target = ["--target", str(graph)]
    assert main(["optimize", str(graph), "--cluster", str(cluster), *made]) == 0
    capsys.readouterr()
    for words, reason in (
        ([], "does not hold its graph"),
        (target, "--cluster"),
        ([*target, "--cluster", str(cluster), "--inference"], "extracted already"),
    ):
        assert main(["show", str(placement), *words, "--html", str(out)]) == 2
        assert reason in capsys.readouterr().err
    assert main(["show", str(placement), *target, "--inference"]) == 2
    assert "--target and --inference are options of a report" in capsys.readouterr().err
    assert main(["show", str(placement), *target, "--html", str(placement)]) == 2
    assert "are the same file" in capsys.readouterr().err
    save_graph(fork(1), graph)  # a placement that cannot run
    cluster.write_text(cluster_to_toml(replace(one_kind(2), links=())))
    placement.write_text(
        json.dumps({"format": "placer-placement/1", "devices": {"s": "d0", "0": "d1"}})
    )
    words = [*target, "--cluster", str(cluster), "--html", str(out)]
    assert main(["show", str(placement), *words]) == 1
    assert "no link" in capsys.readouterr().err
    assert not out.exists()
