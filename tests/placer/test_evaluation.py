"""Graphs are extracted and placements evaluated from Python, simulated or measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import placer
from envs.hardware.cluster import Cluster, cluster_to_toml
from envs.hardware.discover import discover
from envs.runtime import Runtime, runtime_for
from graphs.extract import Extraction, extract
from graphs.graph_file import load_graph
from placer.cli.main import main
from placer.costed_step import costed_step
from placer.evaluation import Evaluation, evaluate_job, evaluation_job
from placer.job import Job
from placer.messages.remarks import core_refusal, core_refusal_in_short, extraction_remarks
from placer.progress import Silent
from tests.helpers import tiny_models
from tests.helpers.clusters import toy_pair


@pytest.fixture
def placed(files: Callable[..., tuple[Path, Path]]) -> tuple[placer.Result, Path, Path]:
    """Return a result, and the files of its graph and cluster."""
    graph, cluster = files()
    return placer.optimize(graph, cluster, budget="20e", progress=False), graph, cluster


def layers() -> placer.Workload:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return placer.Workload.of(model, (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


def test_a_placement_is_simulated_as_the_search_did_and_as_the_command_does(
    placed: tuple[placer.Result, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, graph, cluster = placed
    result.save(tmp_path / "placement.json")
    evaluations = [
        placer.evaluate(result, progress=False),
        placer.evaluate(result, load_graph(graph), cluster, progress=False),
        placer.evaluate(tmp_path / "placement.json", graph, devices=cluster, progress=False),
    ]
    command = ["simulate", str(graph), "--cluster", str(cluster), "--json", "--placement"]
    assert main([*command, str(tmp_path / "placement.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    for evaluation in evaluations:
        assert evaluation.step_s == result.best.predicted_s
        assert evaluation.to_dict() == printed


def test_a_placement_that_does_not_fit_is_infeasible_with_a_reason(
    placed: tuple[placer.Result, Path, Path], files: Callable[..., tuple[Path, Path]]
) -> None:
    result, graph, _ = placed
    _, small = files(1)
    evaluation = placer.evaluate(result, graph, small, progress=False)
    assert not evaluation.feasible
    assert evaluation.why in str(evaluation)
    assert json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))["step_s"] is None


class TwiceAsSlow:
    """Return twice the simulated step time."""

    def __init__(self, problem: Any) -> None:
        self.simulated = placer.Simulated(problem)

    def evaluate(
        self, placements: Sequence[placer.Placement], progress: Any = None
    ) -> list[placer.StepResult]:
        results = self.simulated.evaluate(placements, progress)
        return [placer.StepResult(step_s=2 * each.step_s, peak_memory_bytes={}) for each in results]


def test_a_backend_of_the_user_evaluates_beside_the_simulator(
    placed: tuple[placer.Result, Path, Path],
) -> None:
    result = placed[0]
    evaluation = placer.evaluate(result, backend=TwiceAsSlow(result.problem), progress=False)
    assert evaluation.step_s == 2 * evaluation.predicted.step_s == 2 * result.best.predicted_s
    assert evaluation.to_dict()["predicted"]["step_s"] == result.best.predicted_s


class Wrong:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def evaluate(self, placements: Sequence[placer.Placement], progress: Any = None) -> Any:
        return self.answer


def taking(step_s: float) -> placer.StepResult:
    return placer.StepResult(step_s=step_s, peak_memory_bytes={})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([taking(math.nan)], "a step time of nan: return"),
        ([taking(-1.0)], "a step time of -1: return"),
        ([taking(math.inf)], "a step time of inf: return"),
        (None, "gave NoneType for 1 placements: return one StepResult for each"),
        (taking(1.0), "gave StepResult for 1 placements: return one StepResult for each"),
        ([], r"gave 0 results for 1 placements: return one StepResult for each"),
        ([1.0], r"gave 1 results \(float\) for 1 placements: return one StepResult for each"),
    ],
)
def test_a_backend_of_the_user_gives_a_step_time_for_each(
    placed: tuple[placer.Result, Path, Path], answer: Any, message: str
) -> None:
    result = placed[0]
    with pytest.raises(ValueError, match=message):
        placer.evaluate(result, backend=Wrong(answer), progress=False)


def test_results_of_a_backend_of_the_user_are_counted(
    placed: tuple[placer.Result, Path, Path],
) -> None:
    _, graph, cluster = placed
    backend = Wrong([taking(1.0)])
    search = placer.SearchConfig(policy=None, budget="10e", backend=backend)
    with pytest.raises(ValueError, match="gave 1 results for"):
        placer.optimize(graph, cluster, search=search, progress=False)


def test_steps_that_take_no_time_are_evaluated_but_not_compared(
    placed: tuple[placer.Result, Path, Path],
) -> None:
    result, graph, cluster = placed

    class Instant:
        def evaluate(
            self, placements: Sequence[placer.Placement], progress: Any = None
        ) -> list[placer.StepResult]:
            return [taking(0.0)] * len(placements)

    assert placer.evaluate(result, backend=Instant(), progress=False).step_s == 0.0
    search = placer.SearchConfig(policy=None, budget="10e", backend=Instant())
    with pytest.raises(ValueError, match="a step time of 0, and candidates are compared"):
        placer.optimize(graph, cluster, search=search, progress=False)


def test_what_cannot_be_evaluated_or_extracted_is_refused(
    placed: tuple[placer.Result, Path, Path],
) -> None:
    result, graph, cluster = placed
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("there is no backend 'mesured'", (result,), {"backend": "mesured"}),
        ("a graph has no model to run", (result,), {"backend": "measured"}),
        ("give model or graph", (result.placement,), {}),
        ("no devices of its own", (result.placement, graph), {}),
        ("a graph file has no modules", ({"0": "a"}, graph, cluster), {}),
        ("given twice", (result, graph, cluster), {"devices": cluster}),
        ("its own devices: leave devices out, or give model", (result,), {"devices": "cuda:7"}),
        ("own loss and extractor: leave", (result,), {"loss": max, "extractor": "export"}),
    ]
    for message, arguments, named in refused:
        with pytest.raises(ValueError, match=message):
            placer.evaluate(*arguments, **named, progress=False)
    with pytest.raises(ValueError, match="extracted already"):
        placer.extract(graph, progress=False)


@pytest.mark.slow
def test_a_model_is_extracted_with_the_costs_of_devices_elsewhere() -> None:
    cluster, workload = toy_pair("near", "far"), layers()
    graph = placer.extract(workload, cluster, progress=False)
    assert isinstance(graph, placer.Graph)
    costs_s = [node["cost_s"]["x"] for _, node in graph.nodes(data=True)]
    result = placer.optimize(graph, cluster, budget="1e", progress=False)
    evaluation = placer.evaluate(result, workload, cluster, progress=False)
    assert result.best.predicted_s == evaluation.step_s == pytest.approx(sum(costs_s))
    bare = placer.extract(
        workload.model, workload.inputs, loss=workload.loss, devices=None, progress=False
    )
    assert nx.utils.graphs_equal(nx.DiGraph(bare.edges), nx.DiGraph(graph.edges))
    assert not any(node["cost_s"] for _, node in bare.nodes(data=True))
    with pytest.raises(ValueError, match="not on this machine"):
        placer.evaluate(result, workload, cluster, backend="measured", progress=False)


LINEAR = """
import torch

def build():
    return torch.nn.Linear(4, 2), torch.ones(3, 4)
"""


@pytest.mark.slow
def test_a_placement_of_inference_needs_no_option(tmp_path: Path) -> None:
    cluster, linear = toy_pair("near", "far"), nn.Linear(4, 2)
    workload = placer.Workload.of(linear, torch.ones(3, 4), training=False)
    placement, toml = str(tmp_path / "placement.json"), tmp_path / "cluster.toml"
    placer.optimize(workload, cluster, budget="1e", progress=False).save(placement)
    toml.write_text(cluster_to_toml(cluster))
    (tmp_path / "model.py").write_text(LINEAR)
    target = f"{tmp_path}/model.py:build"
    options = ["--cluster", str(toml), "--quiet"]
    simulated = ["evaluate", target, "--placement", placement, "--backend", "simulated"]
    assert main([*simulated, *options]) == 0
    assert main([*simulated, *options, "--optimizer", "sgd"]) == 2
    report = str(tmp_path / "report.html")
    assert main(["show", placement, "--html", report, "--target", target, *options]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("second_device")
def test_a_device_map_is_measured_and_predicted() -> None:
    cluster = discover("cuda:0,cpu", {"cuda:0": 1 << 30, "cpu": 1 << 30})
    workload, devices = layers(), {"0": "cuda:0", "2": "cpu"}
    before = tiny_models.state_of(workload)
    evaluation = placer.evaluate(devices, workload, cluster, backend="measured", progress=False)
    assert evaluation.measurement is not None
    assert evaluation.measurement.ok, evaluation.measurement.failure
    for module, device in devices.items():
        assert set(evaluation.placement.devices_of(module)) == {device}
    content = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert content["step_s"] == evaluation.step_s
    assert content["rounds"] == len(evaluation.measurement.wall_s)
    assert content["predicted"]["step_s"] == evaluation.predicted.step_s
    [remark] = content["remarks"]
    assert "2 would be computed on cuda:0" in remark
    tiny_models.assert_same(tiny_models.state_of(workload), before)


@pytest.mark.slow
def test_a_model_that_cannot_be_copied_is_run_with_a_remark() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: object) -> Single:
            raise RuntimeError("there is one only")

    core = f"core:{min(os.sched_getaffinity(0))}"
    workload = placer.Workload.of(Single(4, 2), torch.randn(3, 4), training=False)
    evaluation = placer.evaluate({"": core}, workload, backend="measured", progress=False)
    assert evaluation.measurement is not None
    assert evaluation.measurement.ok, evaluation.measurement.failure
    [remark] = evaluation.to_dict()["remarks"]
    assert remark.startswith("Measured steps exclude handing over batch and results")


@pytest.mark.slow
@pytest.mark.usefixtures("second_device")
def test_the_host_is_held_to_its_memory_limit() -> None:
    workload = layers()

    def run(device: str, memory: str) -> Evaluation:
        limits = {"cuda:0": "1GiB", "cpu": memory}
        job = evaluation_job({"": device}, workload, "cuda:0,cpu", memory=limits)
        return evaluate_job(job, "measured", Silent())

    refused = run("cpu", "100B")
    assert refused.measurement is not None
    assert not refused.feasible
    assert "but has 100 B" in refused.why
    assert run("cpu", "1MB").feasible
    assert run("cuda:0", "100B").feasible


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices of this machine are cores")
def test_a_map_on_a_pinned_core_is_measured_on_its_own_devices() -> None:
    core = discover("auto").names[0]
    evaluation = placer.evaluate({"": core}, layers(), backend="measured", progress=False)
    assert evaluation.placement.device_names == (core,)
    assert evaluation.feasible, evaluation.why
    with pytest.raises(ValueError, match="no device cuda:7"):
        placer.evaluate({"": 7}, layers(), progress=False)


def test_a_result_is_measured_with_the_memory_that_was_given_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = f"core:{min(os.sched_getaffinity(0))}"
    search = placer.SearchConfig(budget="10e", policy=None, measure=False)
    limits = placer.Constraints(memory={core: "64MB"})
    result = placer.optimize(layers(), core, constraints=limits, search=search, progress=False)
    assert result.problem.cluster.devices[0].memory_bytes < 64_000_000  # workers hold the rest
    given = []

    def noted(extraction: Extraction, cluster: Cluster, **options: Any) -> Runtime:
        given.append(cluster.devices[0].memory_bytes)
        return runtime_for(extraction, cluster, **options)

    monkeypatch.setattr("placer.evaluation.runtime_for", noted)
    evaluation = placer.evaluate(result, backend="measured", progress=False)
    assert given == [64_000_000]
    assert evaluation.feasible, evaluation.why


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="devices of this machine are cores")
def test_a_measured_backend_runs_several_placements_in_the_same_rounds() -> None:
    core = discover("auto").names[0]
    first = placer.evaluate({"": core}, layers(), progress=False)
    with placer.measured(layers(), core, rounds=2) as backend:
        runs = backend.evaluate([first.placement, first.placement])
        assert isinstance(backend, placer.Measured)
    assert [run.measurement is not None and len(run.measurement.wall_s) for run in runs] == [2, 2]
    with pytest.raises(ValueError, match="are here to run"):
        placer.measured(layers(), toy_pair("near", "far"))


class Told(Silent):
    """Keeps the titles of stages and the remarks, in order."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def stage(self, title: str) -> None:
        self.texts.append(title)

    def remark(self, text: str) -> None:
        self.texts.append(text)


def doubling(m: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m.a(x) * 2 if x.sum() > 0 else m.a(x)
    return out


def test_what_apply_refuses_is_said_before_anything_is_measured() -> None:
    model = tiny_models.Plain(doubling, a=nn.Linear(4, 4))
    workload = placer.Workload.of(model, torch.randn(3, 4), training=False)
    core = f"core:{min(os.sched_getaffinity(0))}"
    search = placer.SearchConfig(policy=None, measure=False)
    told = Told()
    step = costed_step(Job.of(workload, core, search=search, extractor="dispatch"), told)
    assert step.extraction is not None
    refusal = core_refusal(step.extraction)
    assert told.texts.index(refusal) < told.texts.index("Measuring op costs")
    assert "extractor modules" in refusal
    assert __file__ in refusal
    assert "torch.where" in refusal
    line = 'File "/lib/site-packages/some/module.py", line 3, in check'
    foreign = replace(step.extraction, depends_on_data=(line,))
    assert "give the model the inputs and options" in foreign.core_refusal


def test_nothing_is_refused_where_the_step_can_run_on_any_data() -> None:
    told = Told()
    core = f"core:{min(os.sched_getaffinity(0))}"
    costed_step(Job.of(layers(), core, search=placer.SearchConfig(policy=None)), told)
    assert "refuses" not in " ".join(told.texts)


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_modules_are_recommended_unless_they_were_refused(optimizer: str | None) -> None:
    model = tiny_models.Plain(doubling, a=nn.Linear(4, 4))
    inputs = (torch.ones(4, 4), torch.ones(4, 4))
    workload = placer.Workload.of(model, inputs, nn.functional.mse_loss, optimizer=optimizer)
    extraction = extract(workload, needs="any data")
    if optimizer is None:
        assert extraction.extractor == "modules"
        return
    assert extraction.extractor == "dispatch"
    assert "place whole modules" not in core_refusal(extraction)
    assert core_refusal_in_short(extraction).endswith("nor can whole modules.")
    reason = "a graph of modules has no ops for an optimizer"
    assert any(reason in remark for remark in extraction_remarks(extraction))
