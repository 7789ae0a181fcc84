"""The main job on real models and cores, and its decision rule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placer
from envs.core_runtime import CoreRuntime, rounds_for
from envs.hardware.cluster import Cluster, Device, Link
from envs.simulator import INFEASIBLE_NS, Schedule, Simulated, Simulator
from envs.simulator.schedule import repeats, run_order
from graphs.coarsen.groups import coarsen
from graphs.graph import add_edge, add_op, new_graph
from graphs.synthetic.families import draw
from placer.choose import PlacementError
from placer.cli.main import main
from placer.job import Job, SearchConfig
from placer.pipeline import optimize_job, optimize_problem
from placer.result import Result
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import Rule, round_robin
from placer.search.objectives import Objective
from placer.search.request import Budget, Meter, SearchRequest
from tests.helpers.folders import ROOT
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import problem_of, random_case

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
PAIR = Cluster(
    name="pair",
    devices=(
        Device(name="a", kind="x", memory_bytes=1 << 40),
        Device(name="b", kind="x", memory_bytes=1 << 40),
    ),
    links=(Link(between=("a", "b"), latency_s=1e-5, bandwidth_bytes_per_s=1e9),),
)


class Impostor(Rule):
    """A plug-in whose placement has the name of a heuristic."""

    def candidates(self, evaluator: Evaluator) -> list[Candidate]:
        devices = round_robin(evaluator.problem)
        return [
            evaluator.candidate(Kind.OTHER, devices, evaluator.scheduling.bottom_level, name="ETF")
        ]


def test_a_plug_in_with_the_name_of_a_heuristic_replaces_none() -> None:
    request = SearchRequest(random_problem(0), Budget(evaluations=1))
    found = Objective().search(request, Impostor())
    assert [own.kind for own in found if own.name == "ETF"].count(Kind.ETF) == 1
    assert [own.kind for own in found if own.name == "ETF"].count(Kind.OTHER) == 1


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**7))
def test_a_schedule_that_priorities_repeat_is_not_simulated_again(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed, bad_places=False))
    schedule = Simulator(problem).run(devices, priority)
    ordered = np.empty(problem.op_count)
    ordered[run_order(problem, schedule.start_ns)] = np.arange(problem.op_count, 0, -1)
    if schedule.step_ns < INFEASIBLE_NS and repeats(problem, schedule, ordered):
        again = Simulator(problem).run(devices, ordered)
        assert again.start_ns.tolist() == schedule.start_ns.tolist()
        assert again.peak_bytes.tolist() == schedule.peak_bytes.tolist()
        assert again.reason == schedule.reason


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_predicted_is_the_step_of_the_placement(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = Simulator.run

    def counted(simulator: Simulator, *args: Any, **named: Any) -> Schedule:
        runs.append(simulator.problem.op_count)
        return run(simulator, *args, **named)

    monkeypatch.setattr(Simulator, "run", counted)
    problem = random_problem(3, ops=20)
    objective = Objective(micro_batches=micro_batches)
    result = optimize_problem(problem, SearchConfig(placer="heft", objective=objective))
    assert runs.count(problem.op_count) == len(result.candidates)
    monkeypatch.undo()
    placements = [own.placement for own in result.candidates]
    for own, step in zip(result.candidates, Simulated(problem).evaluate(placements), strict=True):
        assert own.predicted_s == step.step_s
        assert own.peak_memory_bytes == step.peak_memory_bytes


@pytest.mark.parametrize(("step_s", "rounds"), [(10.0, 7), (0.1, 15), (1e-4, 41), (0.0, 41)])
def test_short_steps_are_run_more_often(step_s: float, rounds: int) -> None:
    assert rounds_for(step_s) == rounds


@pytest.mark.parametrize("objective", [Objective(), Objective(name="max-load")])
def test_what_was_not_found_to_fit_is_not_said_to_fit_nowhere(objective: Objective) -> None:
    resident = int(random_problem(0, ops=24).graph.resident_bytes.sum())
    share = 0.45 if objective.name == "latency" else 0.36
    problem = random_problem(0, ops=24, devices=3, memory_bytes=int(share * resident))
    name = "heft" if objective.name == "latency" else "layer-split"
    search = SearchConfig(placer=name, objective=objective)
    with pytest.raises(PlacementError, match="within the budget"):
        optimize_problem(problem, search)


def chain(length: int) -> nx.DiGraph[str]:
    graph = new_graph("chain")
    for i in range(length):
        add_op(graph, str(i), cost_s={"*": 1e-3}, output_bytes=1000)
        if i:
            add_edge(graph, str(i - 1), str(i))
    return graph


def optimized(graph: nx.DiGraph[str], **search: Any) -> Result:
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
    assert found.speedup == pytest.approx(2.0)
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
    assert {"HEFT by op", "ETF by op"} <= {row.name for row in found.candidates}
    coarse = coarsen(graph, most_groups=12)
    where = np.array(found.placement.devices)
    assert all(len(set(where[coarse.group_of == g])) == 1 for g in range(len(coarse)))
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
    judged = "cpu_clock_s" if found.placement.measured["clock"] == "cpu" else "wall_median_s"
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


TWO_TOWERS = ["optimize", f"{ROOT / 'graphs' / 'models' / 'two_towers.py'}:build"]


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_search_and_keeps_the_best_so_far(
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    request_: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks: list[int] = []
    is_over, search = Meter.over, Objective.search

    def stopped(meter: Meter, share: float = 1.0) -> bool:
        looks.append(1)
        if len(looks) == 3:
            signal.raise_signal(request_)
        return is_over(meter, share)

    def searching(*arguments: Any) -> list[Candidate]:
        monkeypatch.setattr(Meter, "over", stopped)
        return search(*arguments)

    monkeypatch.setattr(Objective, "search", searching)
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

    monkeypatch.setattr(CoreRuntime, "costs", stopped)
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
