"""The main job on real models and cores, and its decision rule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import tiny_models
import torch
from random_problems import random_problem
from torch import nn

import placer
from envs.cluster import Cluster, Device, Link
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.coarsen import coarsen
from graphs.extract import extract
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic import draw
from placer import pipeline
from placer.cli.main import main
from placer.job import Job, SearchConfig
from placer.objectives import Objective
from placer.outcome import Optimization, PlacementError, Row, choose, extraction_remarks
from placer.pipeline import optimize_job, optimize_problem
from placer.policies import load
from placer.record import candidates_to_list
from placer.rigs import Cores, rounds_for
from placer.running import worth_running
from placer.search.budget import Budget, Meter

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
PAIR = Cluster(
    name="pair",
    devices=(
        Device(name="a", kind="x", memory_bytes=1 << 40),
        Device(name="b", kind="x", memory_bytes=1 << 40),
    ),
    links=(Link(between=("a", "b"), latency_s=1e-5, bandwidth_bytes_per_s=1e9),),
)


def row(name: str, predicted_s: float, runs_s: list[float] | None, *, single: bool = False) -> Row:
    """Return a candidate of two ops with these measurements; rebuilt time equals wall time."""
    placement = Placement(
        graph="",
        cluster="pair",
        ops=("x", "y"),
        device_names=("a", "b"),
        devices=(0, 0) if single else (0, 1),
        priority=(1.0, 0.0),
    )
    seen = None
    if runs_s is not None:
        times = np.array(runs_s)
        seen = Measurement(wall_s=times, rebuilt_s=times, failure="" if runs_s else "it died")
    return Row(
        name=name,
        placement=placement,
        predicted_s=predicted_s,
        peak_memory_bytes={"a": 1, "b": 1},
        why="" if np.isfinite(predicted_s) else "a needs 2 B but has 1 B",
        measurement=seen,
    )


def test_the_fastest_measured_wins_whatever_was_predicted() -> None:
    rows = [
        row("annealing", 1.0, [2.0, 2.1, 2.0]),
        row("HEFT", 1.5, [1.5, 1.6, 1.5]),
        row("single a", 3.0, [3.0, 3.0, 3.1], single=True),
    ]
    assert choose(rows).name == "HEFT"


def test_nothing_measured_slower_than_one_device_is_ever_best() -> None:
    rows = [
        row("annealing", 1.0, [3.2, 3.1, 3.2]),
        row("single a", 3.0, [3.0, 3.0, 3.0], single=True),
    ]
    assert choose(rows).name == "single a"


def test_of_a_tie_the_simpler_wins() -> None:
    rows = [
        row("annealing", 1.0, [1.000, 1.050, 0.990]),
        row("layer split", 1.0, [1.001, 1.040, 1.000]),
        row("single a", 3.0, [3.0, 3.0, 3.1], single=True),
    ]
    assert choose(rows).name == "layer split"


def test_a_simpler_tie_that_is_slower_than_one_device_does_not_win() -> None:
    rows = [
        row("annealing", 1.0, [0.98, 1.30, 0.99]),
        row("layer split", 1.0, [1.02, 1.28, 0.98]),
        row("single a", 1.0, [1.0, 1.31, 1.005], single=True),
    ]
    assert choose(rows).name == "annealing"
    assert choose(rows[:2]).name == "layer split"


def test_what_noise_cannot_tell_from_one_device_does_not_win_over_it() -> None:
    rows = [
        row("annealing", 1.0, [1.90, 1.95, 1.92]),
        row("HEFT", 1.0, [1.91, 2.30, 1.99]),
        row("single a", 2.0, [2.00, 2.05, 2.01], single=True),
    ]
    assert choose(rows).name == "annealing"
    assert choose([rows[1], rows[2]]).name == "single a"


def outcome(rows: list[Row]) -> Optimization:
    """Return an optimization of two ops with these candidates."""
    graph = new_graph("two")
    for op_id in ("x", "y"):
        add_op(graph, op_id, cost_s={"*": 1.0})
    best = choose(rows)
    return Optimization(
        placement=best.placement,
        problem=Problem.of(GraphArrays.from_graph(graph), PAIR),
        rows=tuple(rows),
        best=best,
        lower_bound_s=1.0,
        search_s=0.0,
        stopped=False,
    )


def test_candidates_are_told_to_machines_as_they_are() -> None:
    fast, broken = row("HEFT", 1.0, [1.0, 1.5, 2.0]), row("single a", 2.0, [], single=True)
    full = replace(row("ETF", np.inf, None), why="no room")
    rows = [fast, broken, full, row("single b", 4.0, None, single=True)]
    told = candidates_to_list(outcome(rows))
    json.dumps(told, allow_nan=False)
    heft, single, etf, other = told
    assert [one["name"] for one in told if one["chosen"]] == ["HEFT"]
    assert heft["measured"]["wall_median_s"] == 1.5
    assert heft["measured"]["wall_min_s"] == 1.0
    assert heft["measured"]["spread"] == pytest.approx(1 / 3)
    assert (heft["predicted_step_s"], heft["speed_up"]) == (1.0, 4.0)
    assert (single["measured"], single["why"]) == (None, "it died")
    assert (etf["predicted_step_s"], etf["speed_up"], etf["why"]) == (None, None, "no room")
    assert (other["measured"], other["speed_up"], other["why"]) == (None, 1.0, "")


def test_a_single_device_that_failed_is_no_yardstick() -> None:
    fast, broken = row("HEFT", 1.0, [1.0, 1.0, 1.0]), row("single a", 2.0, [], single=True)
    found = outcome([fast, broken])
    assert np.isnan(found.speed_up)
    assert "it died" in found.verdict
    assert len(found.remarks) == 1
    found = outcome([fast, broken, row("single b", 4.0, None, single=True)])
    assert found.speed_up == pytest.approx(4.0)


def test_remarks_tell_of_scatter_wrong_predictions_and_of_the_impossible() -> None:
    rows = [
        row("HEFT", 0.5, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]),
        row("single a", 4.0, [8.0] * 7, single=True),
    ]
    found = replace(outcome(rows), lower_bound_s=2.0)
    scatter, wrong, impossible = found.remarks
    assert "100%" in scatter
    assert "0.50" in wrong
    assert "2.00x" in impossible


def test_a_remark_tells_that_lstms_are_trained_by_another_kernel_where_nothing_is_placed() -> None:
    step = tiny_models.lstm()
    assert len(extraction_remarks(extract(step))) == 1
    assert extraction_remarks(extract(replace(step, training=False))) == []
    assert extraction_remarks(extract(tiny_models.tied_weights())) == []


@pytest.mark.parametrize(("step_s", "rounds"), [(10.0, 7), (0.1, 15), (1e-4, 41), (0.0, 41)])
def test_short_steps_are_run_more_often(step_s: float, rounds: int) -> None:
    assert rounds_for(step_s) == rounds


def test_failed_candidates_do_not_win_and_do_not_stop_the_rest() -> None:
    rows = [row("annealing", 1.0, []), row("single a", 3.0, [3.0, 3.0], single=True)]
    assert choose(rows).name == "single a"
    with pytest.raises(PlacementError, match="it died"):
        choose(rows[:1])


def test_without_measurements_the_prediction_decides_and_memory_is_a_reason() -> None:
    assert choose([row("ETF", 1.0, None), row("single a", 2.0, None)]).name == "ETF"
    with pytest.raises(PlacementError, match="ETF: a needs 2 B but has 1 B"):
        choose([row("ETF", np.inf, None)])


@pytest.mark.parametrize("objective", [Objective(), Objective(name="max-load")])
def test_what_was_not_found_to_fit_is_not_said_to_fit_nowhere(objective: Objective) -> None:
    resident = int(random_problem(0, ops=24).graph.resident_bytes.sum())
    share = 0.45 if objective.name == "latency" else 0.36
    problem = random_problem(0, ops=24, devices=3, memory_bytes=int(share * resident))
    name = "heft" if objective.name == "latency" else "layer-split"
    search = SearchConfig(placer=name, objective=objective)
    with pytest.raises(PlacementError, match="within the budget"):
        optimize_problem(problem, search)


def test_the_plan_that_misses_memory_by_least_is_named() -> None:
    rows = [
        replace(row(name, np.inf, None), missing_bytes=missing, why=f"a lacks {missing} B.")
        for name, missing in (("cut", 0), ("single a", 30), ("HEFT", 10), ("ETF", 20))
    ]
    with pytest.raises(PlacementError, match="HEFT misses by least: a lacks 10 B"):
        choose(rows)


def test_a_longer_search_finds_what_a_short_one_did_not() -> None:
    resident = int(random_problem(1, ops=24).graph.resident_bytes.sum())
    problem = random_problem(1, ops=24, devices=3, memory_bytes=int(0.45 * resident))
    search = SearchConfig(policy=load("generalist"), budget=Budget(evaluations=20))
    with pytest.raises(PlacementError, match="No placement that was found"):
        optimize_problem(problem, search)
    found = optimize_problem(problem, replace(search, budget=Budget(evaluations=2000)))
    assert np.isfinite(found.best.predicted_s)


def test_the_best_single_device_and_the_best_few_others_are_run() -> None:
    rows = [row(f"annealing {i}", 1.0 + i / 10, None) for i in range(4)]
    rows += [row("HEFT", 2.0, None), row("ETF", 2.1, None), row("evolution", np.inf, None)]
    rows += [row("single a", 3.1, None, single=True), row("single b", 3.0, None, single=True)]
    chosen = [rows[i].name for i in worth_running(rows, PAIR)]
    assert chosen == ["single b", *(f"annealing {i}" for i in range(4)), "HEFT"]


def chain(length: int) -> nx.DiGraph[str]:
    graph = new_graph("chain")
    for i in range(length):
        add_op(graph, str(i), cost_s={"*": 1e-3}, output_bytes=1000)
        if i:
            add_edge(graph, str(i - 1), str(i))
    return graph


def optimized(graph: nx.DiGraph[str], **search: Any) -> Optimization:
    config = SearchConfig(policy=None, **search)
    return optimize_job(Job(source=graph, cluster=PAIR, search=config))


def test_a_chain_has_no_headroom_and_stays_on_one_device() -> None:
    found = optimized(chain(12), budget="200e")
    assert found.best.is_single
    assert "headroom" in found.verdict
    assert found.best.predicted_s == pytest.approx(12e-3)
    assert found.lower_bound_s == pytest.approx(12e-3)


def test_independent_ops_are_split_and_the_gain_is_told() -> None:
    graph = new_graph("independent")
    for i in range(8):
        add_op(graph, str(i), cost_s={"*": 1e-3})
    found = optimized(graph, budget="200e")
    assert found.best.predicted_s == pytest.approx(4e-3)
    assert found.speed_up == pytest.approx(2.0)
    assert found.verdict.startswith("2.00x")


class Towers(nn.Module):
    """Two independent branches, heavy enough for two cores to pay off."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self.right = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.left(x) * self.right(x)
        return product.mean()


def test_groups_of_ops_are_placed_as_one_and_simulated_op_by_op() -> None:
    graph = draw(np.random.default_rng(3), "inception", max_ops=100)
    found = optimized(graph, budget="400e", groups=12)
    coarse = coarsen(graph, most_groups=12)
    where = np.array(found.placement.devices)
    assert all(len(set(where[coarse.members(g)])) == 1 for g in range(len(coarse)))
    (again,) = Simulated(found.problem).evaluate([found.placement])
    assert again.step_s == pytest.approx(found.best.predicted_s, rel=0, abs=1e-15)


@pytest.mark.slow
@two_cores
def test_a_model_is_placed_measured_and_runs_as_placed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Towers(), torch.randn(128, 256)
    found = placer.optimize(model, x, devices="core:0,core:1", budget="300e", progress=False)
    single = found.single
    assert single is not None
    assert single.measurement is not None
    assert found.placement.measured is not None
    assert found.placement.measured["rounds"] > 7
    assert {key for key in found.placement.measured if key.startswith("all_cores")} == {
        "all_cores_wall_median_s",
        "all_cores_wall_min_s",
    }
    judged = "rebuilt_s" if found.placement.measured["clock"] == "cpu" else "wall_median_s"
    for whose in ("", "single_device_"):
        judged_s = found.placement.measured[f"{whose}{judged}"]
        assert found.placement.measured[f"{whose}step_s"] == judged_s
    assert found.device_of("left.0") in ("core:0", "core:1")
    assert sum(found.devices_of("right").values()) > 3

    found.save(tmp_path / "placement.json")
    expected = model(x)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for placement in (found, tmp_path / "placement.json"):
        model.zero_grad()
        with placer.apply(model, placement, x) as placed:
            assert torch.equal(placed.step(x), expected.detach())
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, gradients[name])


def test_a_placement_file_needs_example_inputs_and_its_own_graph(tmp_path: Path) -> None:
    found = optimized(chain(3), budget="50e")
    found.save(tmp_path / "placement.json")
    with pytest.raises(ValueError, match="example_inputs"):
        placer.apply(Towers(), tmp_path / "placement.json")


TWO_TOWERS = ["optimize", f"{Path(__file__).parents[1] / 'examples' / 'two_towers.py'}:build"]


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_search_and_keeps_the_best_so_far(
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    request_: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks: list[int] = []
    is_over, searched = Meter.over, pipeline._searched

    def stopped(meter: Meter, share: float = 1.0) -> bool:
        looks.append(1)
        if len(looks) == 3:
            signal.raise_signal(request_)
        return is_over(meter, share)

    def searching(*arguments: Any) -> list[Row]:
        monkeypatch.setattr(Meter, "over", stopped)
        return searched(*arguments)

    monkeypatch.setattr(pipeline, "_searched", searching)
    out = tmp_path / "placement.json"
    graph, cluster = map(str, files())
    arguments = ["--cluster", cluster, "--budget", "60m", "--out", str(out)]
    assert main(["optimize", graph, *arguments]) == 0
    assert "stopped early" in capsys.readouterr().err
    written = json.loads(out.read_text())
    assert written["predicted"]["step_s"] > 0
    assert written["measured"] is None


def test_ctrl_c_before_there_is_anything_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Cores, "costed", stopped)
    out = tmp_path / "placement.json"
    assert main([*TWO_TOWERS, "--devices", "core:0", "--out", str(out)]) == 1
    assert "stopped before" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
@two_cores
def test_ctrl_c_while_measuring_keeps_the_best_so_far(tmp_path: Path) -> None:
    stage = "Running the best for real"
    out = tmp_path / "placement.json"
    arguments = ["--devices", "core:0,core:1", "--budget", "200e", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "placer.cli.main", *TWO_TOWERS, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if line.startswith(stage):
                process.send_signal(signal.SIGINT)
                break
        told += process.stderr.readlines()
        assert process.wait(timeout=60) == 0, told
    assert "stopped early" in "".join(told)
    assert json.loads(out.read_text())["predicted"]["step_s"] > 0
