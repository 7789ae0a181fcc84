"""The main job on real models and cores, and its decision rule."""

from __future__ import annotations

import copy
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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placer
from envs.core_runtime.runtime import CoreRuntime, rounds_for
from envs.executors.unplaced import UnplacedModel
from envs.hardware.discover import present
from envs.hardware.units import human_bytes
from envs.placement import Placement
from envs.problem import toy_problem
from envs.simulator import INFEASIBLE_NS, Schedule, Simulated, Simulator
from envs.simulator.schedule import repeats, run_order
from graphs.coarsen.groups import coarsen
from graphs.extract import extract
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic.families import draw
from placer.choose import PlacementError
from placer.cli.main import main
from placer.costed_step import costed_step, unplaced_problems
from placer.job import Job, SearchConfig
from placer.pipeline import optimize_job, optimize_problem
from placer.pipeline.optimization import proved_bounds_s
from placer.progress import Silent
from placer.result import Result
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import Rule, heuristics, round_robin
from placer.search.objectives import Objective
from placer.search.request import Budget, Meter, SearchRequest
from tests.fake_cuda import fake_cuda
from tests.helpers import tiny_models
from tests.helpers.clusters import toy_pair
from tests.helpers.folders import ROOT
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import problem_of, random_case

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
PAIR = toy_pair("a", "b")


def test_a_plug_in_with_the_name_of_a_heuristic_replaces_none() -> None:
    class Impostor(Rule):
        def candidates(self, evaluator: Evaluator) -> list[Candidate]:
            devices, levels = round_robin(evaluator.problem), evaluator.scheduling.bottom_level
            return [evaluator.candidate(Kind.OTHER, devices, levels, name="ETF")]

    request = SearchRequest(random_problem(0), Budget(evaluations=1))
    kinds = [row.kind for row in Objective().search(request, Impostor()) if row.name == "ETF"]
    assert sorted(kinds, key=str) == sorted([Kind.ETF, Kind.OTHER], key=str)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**7))
def test_a_schedule_that_priorities_repeat_is_not_simulated_again(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed, bad_places=False))
    schedule = Simulator(problem).run(devices, priority)
    ordered = np.empty(problem.op_count)
    ordered[run_order(problem, schedule.start_ns, schedule.end_ns)] = np.arange(
        problem.op_count, 0, -1
    )
    if schedule.step_ns < INFEASIBLE_NS and repeats(problem, schedule, ordered):
        again = Simulator(problem).run(devices, ordered)
        assert again.start_ns.tolist() == schedule.start_ns.tolist()
        assert again.peak_bytes.tolist() == schedule.peak_bytes.tolist()
        assert again.reason == schedule.reason


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**7))
def test_a_prediction_is_never_worse_than_what_the_search_found(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed, bad_places=False))

    class Found(Rule):
        def candidates(self, evaluator: Evaluator) -> list[Candidate]:
            return [evaluator.candidate(Kind.OTHER, devices, priority, name="found")]

    step_ns = Evaluator(problem).candidate(Kind.OTHER, devices, priority).step_ns
    if step_ns < INFEASIBLE_NS:
        rows = optimize_problem(problem, SearchConfig(placer=Found())).candidates
        [found] = [row for row in rows if row.name == "found"]
        assert found.predicted_s * 1e9 < step_ns + 1


def test_an_op_that_takes_no_time_is_not_put_behind_one_that_began_when_it_did() -> None:
    graph = new_graph("waits")
    add_op(graph, "long", cost_s={"*": 1.0}, devices=("a",))
    add_op(graph, "free", cost_s={"*": 0.0}, devices=("a",))
    add_op(graph, "reader", cost_s={"*": 1.0}, devices=("b",))
    add_edge(graph, "free", "reader")
    assert optimized(graph, placer="exact").best.predicted_s == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_candidate_is_simulated_once_and_predicted_as_its_placement_is(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = Simulator.run

    def counted(simulator: Simulator, *args: Any, **named: Any) -> Schedule:
        runs.append(simulator.problem.op_count)
        return run(simulator, *args, **named)

    problem = random_problem(3, ops=20)
    search = SearchConfig(placer="heft", objective=Objective(micro_batches=micro_batches))
    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "run", counted)
        rows = optimize_problem(problem, search).candidates
    assert runs.count(problem.op_count) == len(rows)
    steps = Simulated(problem).evaluate([row.placement for row in rows])
    for row, step in zip(rows, steps, strict=True):
        assert row.predicted_s == step.step_s
        assert row.peak_memory_bytes == step.peak_memory_bytes


@pytest.mark.parametrize(
    ("step_s", "rounds"), [(10.0, 3), (0.1, 3), (0.05, 4), (1e-4, 7), (0.0, 7)]
)
def test_short_steps_are_run_more_often(
    step_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.measured.TURN_S", 0.06)
    assert rounds_for(step_s) == rounds


def test_final_rounds_take_seconds_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.measured.TURN_S", 0.06)
    monkeypatch.setattr("envs.core_runtime.runtime.FINAL_S", 6.0)
    extraction = extract(tiny_models.conv_net())
    runtime = CoreRuntime(extraction, toy_pair("a", "b"))
    found = {step_s: runtime.final_rounds([step_s, step_s]) for step_s in (0.001, 0.1, 0.5, 2.0)}
    assert found == {0.001: 21, 0.1: 15, 0.5: 6, 2.0: 5}


@pytest.mark.parametrize(
    ("objective", "rule", "share"), [("latency", "heft", 0.45), ("max-load", "layer-split", 0.36)]
)
def test_a_model_that_no_candidate_fits_is_not_said_to_fit_nowhere(
    objective: str, rule: str, share: float
) -> None:
    resident = int(random_problem(0, ops=24).graph.resident_bytes.sum())
    problem = random_problem(0, ops=24, devices=3, memory_bytes=int(share * resident))
    with pytest.raises(PlacementError, match="within the budget"):
        optimize_problem(problem, SearchConfig(placer=rule, objective=objective))


def optimized(graph: nx.DiGraph[str], **search: Any) -> Result:
    config = SearchConfig(policy=None, **search)
    return optimize_job(Job(source=graph, cluster=PAIR, search=config))


def test_a_proof_that_no_placement_fits_is_no_bound_of_a_step() -> None:
    first = heuristics(Evaluator(toy_problem()))[0]
    proofs = [replace(first, bound_ns=bound_ns) for bound_ns in (None, 1_000_000, INFEASIBLE_NS)]
    assert proved_bounds_s(proofs) == [1e-3]


def test_a_chain_has_no_headroom_and_independent_ops_are_split() -> None:
    graph = new_graph("ops")
    for i in range(8):
        add_op(graph, str(i), cost_s={"*": 1e-3}, output_bytes=1000)
    result = optimized(graph, budget="200e")
    assert result.best.predicted_s == pytest.approx(4e-3)
    assert result.speedup == pytest.approx(2.0)
    assert result.verdict.startswith("2.00x")
    for i in range(1, 8):
        add_edge(graph, str(i - 1), str(i))
    result = optimized(graph, budget="200e")
    assert result.best.is_single
    assert "headroom" in result.verdict
    assert result.best.predicted_s == pytest.approx(8e-3)
    assert result.lower_bound_s == pytest.approx(8e-3)


def test_groups_of_ops_are_placed_as_one_and_simulated_op_by_op() -> None:
    graph = draw(np.random.default_rng(3), "inception", max_ops=100)
    result = optimized(graph, budget="400e", groups=12)
    assert {"HEFT by op", "ETF by op"} <= {row.name for row in result.candidates}
    coarse = coarsen(graph, most_groups=12)
    where = np.array(result.placement.devices)
    assert all(len(set(where[coarse.group_of == g])) == 1 for g in range(len(coarse)))
    (again,) = Simulated(result.problem).evaluate([result.placement])
    assert again.step_s == pytest.approx(result.best.predicted_s, rel=0, abs=1e-15)


@pytest.mark.slow
@two_cores
def test_a_placement_on_one_set_of_cores_is_the_model_as_it_is(tmp_path: Path) -> None:
    step = replace(tiny_models.conv_net(), optimizer=placer.Optimizer(kind="sgd"))
    graph = GraphArrays.from_graph(placer.extract(step, devices=None, progress=False))
    cluster = present(["core:0-1"])
    zeros = np.zeros(len(graph))
    path = tmp_path / "placement.json"
    Placement.of(graph, cluster, zeros.astype(np.int32), zeros).save(path)
    plain = copy.deepcopy(step.model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    *inputs, target = step.inputs
    with placer.apply(step.model, path, step.inputs, loss=step.loss, optimizer="sgd") as unplaced:
        assert isinstance(unplaced, UnplacedModel)
        for _ in range(2):
            assert step.loss is not None
            loss = step.loss(plain(*inputs), target)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(unplaced.step(step.inputs), loss.detach())
    assert torch.get_num_threads() == 1
    torch.testing.assert_close(step.model.state_dict(), plain.state_dict())


@two_cores
class Remarks(Silent):
    """Keeps what was remarked."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def remark(self, text: str) -> None:
        self.texts += [text] if text else []


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("memory", "is_said"), [({}, False), (15, True), (4000, False)])
def test_what_workers_hold_of_a_limit_of_memory_is_said(memory: Any, is_said: bool) -> None:
    core = f"core:{min(os.sched_getaffinity(0))}"
    limits = {core: f"{memory}MB"} if memory else {}
    job = Job.of(tiny_models.conv_net(), core, constraints=placer.Constraints(memory=limits))
    remarks = Remarks()
    room = costed_step(job, remarks).cluster.devices[0].memory_bytes
    said = [text for text in remarks.texts if f"The worker of {core} holds" in text]
    assert len(said) == is_said
    assert all(f"ops may use {human_bytes(room)}" in text for text in said)


@pytest.mark.slow
def test_what_libraries_hold_of_a_limit_of_memory_of_a_gpu_is_said() -> None:
    limits = {"cuda:0": "400MiB", "cpu": "1GiB"}
    remarks = Remarks()
    with fake_cuda(1):
        constraints = placer.Constraints(memory=limits)
        costed_step(Job.of(tiny_models.conv_net(), "cuda:0,cpu", constraints=constraints), remarks)
    [said] = [text for text in remarks.texts if "ops may use 285.2 MB" in text]
    assert said.startswith("On cuda:0 134.2 MB are for libraries")


@pytest.mark.slow
def test_the_unplaced_model_is_a_candidate_unless_pins_forbid_it_or_nothing_is_run() -> None:
    job = Job.of(tiny_models.conv_net(), "core:0,core:1", search=SearchConfig(measure=False))
    step = costed_step(job, Silent())
    assert unplaced_problems(step, job, Silent()) == []
    runs = replace(job, search=SearchConfig())
    joined, alone = unplaced_problems(step, runs, Silent())
    assert joined.cluster.names == ("core:0-1",)
    assert alone.cluster.names == ("core:0", "core:1")
    assert (joined.graph.hand_over_s, alone.graph.hand_over_s) == (0.0, 0.0)
    graph = placer.Constraints(pins={"*": "core:0"}).applied_to(step.graph, step.cluster)
    assert unplaced_problems(replace(step, graph=graph), runs, Silent()) == []


@pytest.mark.slow
@two_cores
def test_a_model_is_placed_measured_and_runs_as_placed(tmp_path: Path) -> None:
    def branch() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = model.left(x) * model.right(x)
        return product.mean()

    model, x = tiny_models.Plain(forward, left=branch(), right=branch()), torch.randn(128, 256)
    result = placer.optimize(model, x, devices="core:0,core:1", budget="300e", progress=False)
    assert result.single is not None
    assert result.single.measurement is not None
    measured = result.placement.measured
    assert measured is not None
    assert measured["rounds"] >= 3
    assert {"unplaced_wall_median_s", "unplaced_wall_min_s"} <= measured.keys()
    judged = "cpu_clock_s" if measured["clock"] == "cpu" else "wall_median_s"
    for whose in ("", "single_device_"):
        assert measured[f"{whose}step_s"] == measured[f"{whose}{judged}"]
    heft = next(each for each in result.candidates if each.kind is Kind.HEFT)
    assert sum(result.devices_of("right").values()) > 3

    path = tmp_path / "placement.json"
    heft.placement.save(path)
    with pytest.raises(ValueError, match="example_inputs"):
        placer.apply(model, path)
    expected = model(x)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for placement in (heft.placement, path):
        model.zero_grad()
        with placer.apply(model, placement, x) as placed:
            assert torch.equal(placed.step(x), expected.detach())
        tiny_models.assert_same({name: p.grad for name, p in model.named_parameters()}, gradients)


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
    out = tmp_path / "placement.json"
    arguments = ["--devices", "core:0,core:1", "--budget", "200e", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "placer.cli.main", *TWO_TOWERS, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("Running the best for real ..."):  # once: a second one aborts
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, lines
    assert "stopped early" in "".join(lines)
    assert json.loads(out.read_text())["predicted"]["step_s"] > 0
