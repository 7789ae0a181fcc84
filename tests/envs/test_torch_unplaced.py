"""The unplaced model beside placements on torch devices, with a fake second one."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from envs.backend import StepResult, measurements
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Cluster, Device
from envs.measured import Measured
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import costed_problem, runtime_for
from envs.torch_runtime import TorchExecutor
from graphs.extract import StepError, Workload, extract
from graphs.extract.placeable import placeable
from graphs.graph import GraphArrays, add_op, new_graph
from placer.cli.main import main
from placer.costed_step import costed_step, unplaced_problems
from placer.interrupt import Interrupt
from placer.job import Constraints, Job, SearchConfig
from placer.pipeline.candidate_search import CandidateSearch
from placer.progress import Silent
from tests.helpers import tiny_models
from tests.helpers.clusters import MEMORY, equal_costs, pair
from tests.helpers.on_torch_devices import everywhere, opened
from tests.helpers.trained_alike import on_cpu, torch_optimizer, with_optimizer
from tests.helpers.vdev import TRANSFERS

pytestmark = [pytest.mark.usefixtures("second_device"), pytest.mark.slow_repeats]


# --- measuring


@pytest.mark.parametrize("extractor", ["export", "modules"])
def test_the_unplaced_model_is_run_in_turns_with_placements(
    extractor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiny_models.conv_net()
    if extractor == "export":
        step = with_optimizer(step, "adamw")
    before = tiny_models.state_of(step)
    turns: list[str] = []
    unplaced_step = UnplacedModel.step

    def seen(model: UnplacedModel, *batch: Any, **keywords: Any) -> Any:
        parameters = list(model.parameters())
        turns.append(parameters[0].device.type)
        assert {p.device for p in parameters} == {parameters[0].device}
        assert not any(p._post_accumulate_grad_hooks for p in parameters)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return unplaced_step(model, *batch, **keywords)

    monkeypatch.setattr(UnplacedModel, "step", seen)
    with opened(step, extractor, rounds=2, warm_up=1) as backend:
        placements = [
            everywhere(backend.problem, device, unplaced=unplaced)
            for unplaced in (False, True)
            for device in range(2)
        ]
        ran = measurements(backend.evaluate(placements))
        assert [one.failure for one in ran] == [""] * 4
        assert all(one.wall_s.shape == (2,) for one in ran)
        assert isinstance(backend.executor, TorchExecutor)
        on_devices = backend.executor._extraction.step.named_state()
        trained = {name: t for name, t in on_devices.items() if t.requires_grad}
        expected = {name: before[name] for name in trained}
        torch.testing.assert_close(on_cpu(trained), expected, rtol=0, atol=0)
    assert turns.count("cuda") >= 6
    assert turns.count("cpu") >= 6
    tiny_models.assert_same(tiny_models.state_of(step), before)
    assert all(p.device.type == "cpu" and p.grad is None for p in step.model.parameters())


def test_an_unplaced_model_that_runs_out_of_memory_fails_and_the_placements_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cramped(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 512.00 MiB")

    monkeypatch.setattr(UnplacedModel, "step", cramped)
    with opened(tiny_models.conv_net()) as backend:
        there = everywhere(backend.problem, 0)
        assert isinstance(backend.executor, TorchExecutor)
        backend.evaluate([replace(there, unplaced=True)])
        state = backend.executor._extraction.step.named_state()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        full, fine = backend.evaluate([replace(there, unplaced=True), there])
    assert full.measurement is not None
    assert full.measurement.overfull
    assert "512.00 MiB (predicted: " in full.why
    assert "GB on cuda:0" in full.why
    assert fine.feasible, fine.why


def test_an_unplaced_model_too_large_for_the_host_is_not_run() -> None:
    extraction = extract(tiny_models.conv_net())
    calls = placeable(extraction)
    executor = TorchExecutor(extraction, calls, equal_costs(calls.graph), limits={"cpu": 1000})
    with Measured(executor, rounds=1) as backend:
        here = everywhere(backend.problem, 1, unplaced=True)
        full, fine = backend.evaluate([here, everywhere(backend.problem, 0, unplaced=True)])
    assert full.why.startswith("cpu needs")
    assert fine.feasible, fine.why


# --- the answer


class Branches(nn.Module):
    """Two branches of a common layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x).relu()
        product: Tensor = self.left(x) * self.right(x)
        return product


def workload(optimizer: str | None = None) -> Workload:
    torch.manual_seed(0)
    inputs = (torch.randn(4, 8), torch.randn(4, 8))
    return Workload.of(Branches(), inputs, nn.MSELoss(), optimizer=optimizer)


def job_of(step: Workload, **pins: str) -> Job:
    constraints = Constraints(memory=MEMORY, pins=pins)
    search = SearchConfig(budget="20e", policy=None)
    return Job.of(step, "cuda:0,cpu", search=search, constraints=constraints)


def takes(monkeypatch: pytest.MonkeyPatch, unplaced_s: float, placed_s: float) -> None:
    """Let the unplaced model and placements take so long when they are measured."""

    def evaluated(_: Measured, placements: Sequence[Placement], *__: object) -> list[StepResult]:
        times_s = [unplaced_s if each.unplaced else placed_s for each in placements]
        measured = [np.full(7, time_s) for time_s in times_s]
        return [
            StepResult.of_measurement(Measurement(wall_s=time_s, cpu_clock_s=time_s), {})
            for time_s in measured
        ]

    monkeypatch.setattr(Measured, "evaluate", evaluated)


def found(step: Workload, **options: Any) -> placer.Result:
    return placer.optimize(
        step,
        "cuda:0,cpu",
        search=SearchConfig(budget="20e", policy=None),
        constraints=Constraints(memory=MEMORY),
        progress=False,
        **options,
    )


@pytest.mark.parametrize(
    ("unplaced_s", "placed_s", "verdict"),
    [
        (1e-3, 1e-3, "faster by more than noise: "),
        (1e-3, 1.2e-3, "It is 1.20x faster than the fastest placement"),
        (1.2e-3, 1e-3, "1.20x faster than the unplaced model on cuda:0"),
    ],
)
def test_the_unplaced_model_wins_unless_a_placement_is_faster(
    unplaced_s: float, placed_s: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(monkeypatch, unplaced_s, placed_s)
    result = found(workload())
    assert verdict in result.verdict
    assert result.placement.unplaced is result.best.is_unplaced is (unplaced_s <= placed_s)
    assert ("leave the model unplaced" in result.verdict) is result.best.is_unplaced
    assert result.unplaced is not None
    assert result.unplaced.placement.used_devices == ("cuda:0",)
    assert result.placement.measured is not None
    assert result.placement.measured["unplaced_wall_median_s"] == unplaced_s


@pytest.mark.parametrize(
    "optimizer", [None, pytest.param("momentum", marks=pytest.mark.slow), "adamw"]
)
def test_a_model_left_unplaced_computes_on_its_device_what_it_computes(
    optimizer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(monkeypatch, 1e-3, 2e-3)
    step, path = workload(optimizer), tmp_path / "placement.json"
    result = found(step)
    result.save(path)
    for placement in (result, path):
        own = copy.deepcopy(step)
        plain = copy.deepcopy(step)
        TRANSFERS.clear()
        with placer.apply(
            own.model, placement, step.inputs, loss=step.loss, optimizer=step.optimizer
        ) as placed:
            assert isinstance(placed, UnplacedModel)
            assert {p.device.type for p in placed.parameters()} == {"cuda"}
            assert TRANSFERS
            assert_steps_alike(placed, plain)


def assert_steps_alike(placed: UnplacedModel, plain: Workload) -> None:
    """Assert that three steps have the losses, gradients and updates of a step on the CPU."""
    assert plain.loss is not None
    own = plain.optimizer
    optimizer = None if own is None else torch_optimizer(plain.model, own)
    *inputs, target = plain.inputs
    for _ in range(3):
        loss = plain.loss(plain.model(*inputs), target)
        torch.autograd.backward(loss)
        torch.testing.assert_close(placed.step(*plain.inputs).cpu(), loss.detach())
        if optimizer is None:
            gradients = {n: p.grad for n, p in placed.named_parameters() if p.grad is not None}
            expected = {n: p.grad for n, p in plain.model.named_parameters()}
            torch.testing.assert_close(on_cpu(gradients), expected, rtol=1e-4, atol=1e-5)
        else:
            optimizer.step()
            optimizer.zero_grad()
    trained = on_cpu(placed.state_dict())
    torch.testing.assert_close(trained, dict(plain.model.state_dict()), rtol=1e-4, atol=1e-5)


TARGET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, (torch.randn(4, 8), torch.randn(4, 4)), nn.MSELoss()
"""


@pytest.mark.slow
def test_commands_read_that_a_model_is_left_unplaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(TARGET)
    target, path = f"{tmp_path / 'model.py'}:build", str(tmp_path / "placement.json")
    memory = ["--memory", "cuda:0=1GiB,cpu=1GiB"]
    with monkeypatch.context() as patch:
        takes(patch, 1e-3, 2e-3)
        where = ["--devices", "cuda:0,cpu", *memory, "--budget", "20e"]
        assert main(["optimize", target, *where, "--out", path, "--json"]) == 0
    assert "leave the model unplaced" in json.loads(capsys.readouterr().out)["verdict"]
    assert json.loads(Path(path).read_text())["unplaced"] is True
    assert main(["show", path]) == 0
    assert "left unplaced" in capsys.readouterr().out
    page = ["--html", str(tmp_path / "page.html"), "--target", target]
    assert main(["show", path, *page, *memory[:1], "cuda:0=1GiB", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "leave the model unplaced" in shown["verdict"]
    ran: list[str] = []
    step = UnplacedModel.step

    def seen(model: UnplacedModel, *batch: Any, **keywords: Any) -> Any:
        ran.append(next(model.parameters()).device.type)
        return step(model, *batch, **keywords)

    monkeypatch.setattr(UnplacedModel, "step", seen)
    for devices in ([*memory[:1], "cuda:0=1GiB"], ["--devices", "cpu,cuda:0", *memory]):
        assert main(["evaluate", target, "--placement", path, *devices, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["feasible"]
        assert set(ran) == {"cuda"}
        ran.clear()


def test_a_run_trains_the_model_left_unplaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(TARGET)
    target, path = f"{tmp_path / 'model.py'}:build", str(tmp_path / "placement.json")
    with monkeypatch.context() as patch:
        takes(patch, 1e-3, 2e-3)
        where = ["--devices", "cpu", "--budget", "20e", "--out", path, "--json"]
        assert main(["optimize", target, *where]) == 0
    assert Placement.load(Path(path)).unplaced
    capsys.readouterr()
    monkeypatch.setattr(PlacedModule, "forward", None)
    assert main(["run", target, "--placement", path, "--steps", "3", "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    assert len(losses) == 3


def test_pins_exclude_the_unplaced_model() -> None:
    step = workload()
    free, pinned = job_of(step), job_of(step, left="cpu")
    costed = costed_step(free, Silent())
    assert len(unplaced_problems(costed, free, Silent())) == 1
    graph = pinned.constraints.applied_to(costed.graph, costed.cluster)
    assert unplaced_problems(replace(costed, graph=graph), pinned, Silent()) == []


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"cpu": 100, "gpu:0": 100, "gpu:1": 100}, 1),
        ({"cpu": 100, "gpu:0": 10, "gpu:1": 100}, 2),
        ({"cpu": 100, "gpu:0": 10, "gpu:1": 10}, 0),
        ({"cpu": 10, "gpu:0": 10, "gpu:1": 10}, 1),
    ],
)
def test_it_is_unplaced_on_the_first_device_that_it_fits_on(
    sizes: dict[str, int], expected: int
) -> None:
    graph = new_graph("large")
    add_op(graph, "a", cost_s={"*": 1e-3}, parameter_bytes=50)
    devices = tuple(Device(name=name, kind="x", memory_bytes=size) for name, size in sizes.items())
    problem = Problem.of(GraphArrays.from_graph(graph), Cluster(name="three", devices=devices))
    with Interrupt() as interrupt:
        config = SearchConfig(policy=None)
        search = CandidateSearch(
            config=config, placer=config.placer, interrupt=interrupt, progress=Silent()
        )
        [candidate] = search.unplaced([problem])
    assert candidate.devices.tolist() == [expected]
    assert candidate.placement.unplaced
    assert np.isfinite(candidate.predicted_s) is np.bool_(sizes["cpu"] > 50)


def test_factors_of_the_unplaced_model_change_its_prediction_only() -> None:
    extraction = extract(workload())
    runtime = runtime_for(extraction, pair())
    for _ in range(4):  # three profiles make costs known
        problem = costed_problem(runtime, pair())
    [before] = runtime.unplaced_problems(problem, runtime.graph)
    np.testing.assert_allclose(before.cost_ns, problem.cost_ns)
    kinds = {device.kind: {"matrix product": 2.0} for device in problem.cluster.devices}
    runtime.keep_factors(problem.cluster, kinds, unplaced=True)
    [after] = runtime.unplaced_problems(problem, runtime.graph)
    assert after.cost_ns.sum() > before.cost_ns.sum()
    np.testing.assert_array_equal(costed_problem(runtime, pair()).cost_ns, problem.cost_ns)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("extractor", ["auto", "modules"])
def test_a_model_is_measured_unplaced_on_a_gpu_and_computes_there_what_it_computes(
    extractor: str,
) -> None:
    step = workload("adamw" if extractor == "auto" else None)
    result = placer.optimize(
        step,
        "cuda:0,cpu",
        search=SearchConfig(budget="50e", policy=None),
        extractor=extractor,
        progress=False,
    )
    assert result.unplaced is not None
    assert result.unplaced.measurement is not None
    assert result.unplaced.measurement.ok, result.unplaced.measurement.failure
    assert result.unplaced.measurement.peak_memory_bytes["cuda:0"] > 0
    assert result.unplaced.placement.used_devices == ("cuda:0",)
    plain, own = copy.deepcopy(step), copy.deepcopy(step)
    with placer.apply(
        own.model,
        result.unplaced.placement,
        step.inputs,
        loss=step.loss,
        optimizer=step.optimizer,
        extractor=extractor,
    ) as placed:
        assert isinstance(placed, UnplacedModel)
        assert {p.device for p in placed.parameters()} == {torch.device("cuda:0")}
        assert_steps_alike(placed, plain)


def test_steps_refuse_what_the_example_could_not_hold() -> None:
    extraction = extract(tiny_models.conv_net())
    image, target = extraction.step.inputs
    with UnplacedModel(extraction) as unplaced:
        with pytest.raises(StepError, match="array of numpy"):
            unplaced.step(image.numpy(), target)
        with pytest.raises(StepError, match="none is positional"):
            unplaced()
