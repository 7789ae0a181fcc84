"""The unplaced model on pinned cores: on all of them, and on one with one thread."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from envs.backend import StepResult, measurements
from envs.core_runtime import CoreExecutor, CoreRuntime
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Link
from envs.hardware.discover import cores_of, discover, present
from envs.measured import FEWEST_ROUNDS, Measured
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem, without_hand_over
from graphs.costs import with_costs
from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.graph import GraphArrays
from graphs.selection import ConstraintError
from placer.cli.main import main
from tests.helpers import tiny_models

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
ONE, BOTH = f"core:{CORES[0]}", f"core:{CORES[0]},core:{CORES[-1]}"


def small_problem() -> tuple[Extraction, Problem]:
    """Return a step with made-up costs on two cores."""
    extraction = extract(tiny_models.conv_net())
    cost_s = np.full(len(extraction.graph), 1e-5)
    graph = with_costs(extraction.graph, {"core": cost_s}, {"core": "made up"})
    cluster = discover(BOTH)
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    return extraction, Problem.of(GraphArrays.from_graph(graph), replace(cluster, links=(link,)))


def on_first(problem: Problem) -> Placement:
    """Return the placement of all ops on the first core."""
    zeros = np.zeros(problem.op_count)
    return Placement.of(problem.graph, problem.cluster, zeros.astype(np.int32), zeros)


def unplaced_on(problem: Problem, runtime: CoreRuntime, *, cores: int) -> Placement:
    """Return the unplaced model on one core or on both."""
    first = replace(on_first(problem), unplaced=True)
    if cores == 1:
        return first
    joined = runtime.joined(problem.cluster)
    assert joined is not None
    return replace(first, cluster=joined.name, device_names=joined.names)


# --- measuring


@pytest.mark.slow_repeats
@pytest.mark.parametrize("cores", [1, 2])
def test_a_runtime_measures_placements_and_the_unplaced_model(cores: int) -> None:
    extraction, problem = small_problem()
    runtime = CoreRuntime(extraction, problem.cluster)
    unplaced = unplaced_on(problem, runtime, cores=cores)
    [device] = unplaced.used_devices
    assert cores_of(device) == (CORES[0], CORES[-1])[:cores]
    before = torch.get_num_threads(), torch.get_rng_state(), os.sched_getaffinity(0)
    state = {name: t.clone() for name, t in extraction.step.named_state().items()}
    with runtime.backend(problem, [1.0]) as backend:
        results = backend.evaluate([on_first(problem), unplaced])
    placed, runs = measurements(results)
    assert len(runs.wall_s) == len(placed.wall_s) == FEWEST_ROUNDS
    assert runs.has_cpu_clock is (cores == 1)
    assert before[0] == torch.get_num_threads()
    assert before[2] == os.sched_getaffinity(0)
    assert torch.equal(before[1], torch.get_rng_state())
    now = extraction.step.named_state()
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    assert all(tensor.grad is None for tensor in now.values())


def test_an_unplaced_model_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    extraction, problem = small_problem()
    runtime = CoreRuntime(extraction, problem.cluster)
    unplaced = [unplaced_on(problem, runtime, cores=cores) for cores in (1, 2)]
    with Measured(CoreExecutor(extraction, problem), rounds=1) as backend:
        for where in ("training_loss", "_torch_optimizer"):
            monkeypatch.setattr(f"envs.executors.unplaced.{where}", fail)
        placed, *failed = backend.evaluate([on_first(problem), *unplaced])
    assert placed.feasible, placed.why
    assert all("out of luck" in each.why for each in failed)


def test_on_one_core_it_is_pinned_with_one_thread_and_starts_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extraction, problem = small_problem()
    runtime = CoreRuntime(extraction, problem.cluster)
    unplaced = unplaced_on(problem, runtime, cores=1)
    seen: set[tuple[int, frozenset[int]]] = set()
    run_step = copy.copy(extraction.step.model).forward

    def forward(*inputs: Any) -> Any:
        seen.add((torch.get_num_threads(), frozenset(os.sched_getaffinity(0))))
        return run_step(*inputs)

    def no_workers(*_: object, **__: object) -> None:
        raise AssertionError("the unplaced model needs no workers")

    monkeypatch.setattr("envs.core_runtime.executor.WorkerPool", no_workers)
    torch.set_num_threads(2)
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        with runtime.backend(problem, [1.0]) as backend:
            [result] = backend.evaluate([unplaced])
        assert result.feasible, result.why
        monkeypatch.setattr(extraction.step.model, "forward", forward)
        with runtime.apply(unplaced) as placed:
            assert isinstance(placed, UnplacedModel)
            placed.step(extraction.step.inputs)
        assert seen == {(1, frozenset([CORES[0]]))}
        assert before == (torch.get_num_threads(), os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(1)


def test_its_problems_are_all_cores_and_one_core_that_hands_nothing_over() -> None:
    extraction, problem = small_problem()
    one = present([ONE])
    runtime = CoreRuntime(extraction, one)
    assert runtime.joined(one) is None
    handed = Problem.of(replace(problem.graph, hand_over_s=0.5), one)
    [alone] = runtime.unplaced_problems(handed, runtime.graph)
    assert alone.cluster.names == one.names
    assert alone.graph.hand_over_s == 0.0
    assert alone.graph.hash == handed.graph.hash
    joined = present([f"core:{CORES[0]}+{CORES[-1]}"])
    of_both = replace(without_hand_over(problem), cluster=joined)
    found = CoreRuntime(extraction, joined).unplaced_problems(of_both, runtime.graph)
    assert found == [], "a placement on one set of cores is the unplaced model"


# --- the answer


def takes(monkeypatch: pytest.MonkeyPatch, time_s: Callable[[Placement], float]) -> None:
    """Let placements take so long when they are measured."""

    def evaluated(_: Measured, placements: Sequence[Placement], *__: object) -> list[StepResult]:
        measured = [np.full(7, time_s(each)) for each in placements]
        return [
            StepResult.of_measurement(Measurement(wall_s=each, cpu_clock_s=each), {})
            for each in measured
        ]

    monkeypatch.setattr(Measured, "evaluate", evaluated)


def found(step: Workload, devices: str, extractor: str = "auto", **search: Any) -> placer.Result:
    config = placer.SearchConfig(budget="20e", policy=None, **search)
    return placer.optimize(step, devices, search=config, extractor=extractor, progress=False)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("unplaced_s", "verdict"),
    [
        (1e-3, "leave the model unplaced. No placement is faster by more"),
        (0.5e-3, "It is 2.00x faster than the fastest placement, single"),
        (1.5e-3, f"1.50x faster than the unplaced model on {ONE}"),
    ],
)
def test_a_traced_program_on_one_core_wins_only_if_it_is_faster_than_the_model(
    unplaced_s: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiny_models.lstm()
    with monkeypatch.context() as patch:
        takes(patch, lambda each: unplaced_s if each.unplaced else 1e-3)
        result = found(step, ONE)
    assert verdict in result.verdict
    assert {each.name for each in result.candidates if each.measurement} >= {
        "unplaced",
        f"single {ONE}",
    }
    assert result.best.is_unplaced is result.placement.unplaced is (unplaced_s <= 1e-3)
    assert result.speedup == 1.0, "it is that over the faster of the model and its program"
    result.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json")
    assert read.unplaced is result.best.is_unplaced
    assert_computes_alike(step, read, [step.inputs])


@pytest.mark.slow
def test_gains_on_two_cores_are_over_the_model_on_one_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone_s, joined_s, traced_s = 2e-3, 3e-3, 4e-3

    def time_s(placed_s: float) -> Callable[[Placement], float]:
        def of(each: Placement) -> float:
            if each.unplaced:
                return joined_s if len(each.device_names) == 1 else alone_s
            return placed_s if len(each.used_devices) > 1 else traced_s

        return of

    step = tiny_models.gru()
    with monkeypatch.context() as patch:
        takes(patch, time_s(1e-3))
        faster = found(step, BOTH)
    assert faster.best.is_unplaced is False
    assert faster.speedup == 2.0
    assert f"2.00x faster than the unplaced model on {ONE}, measured" in faster.verdict
    assert "threads" not in faster.verdict
    assert faster.unplaced is faster.single
    with monkeypatch.context() as patch:
        takes(patch, time_s(2.5e-3))
        slower = found(step, BOTH)
    assert slower.placement.unplaced
    assert slower.placement.used_devices == (ONE,)
    assert slower.speedup == 1.0
    assert f"leave the model unplaced, on {ONE}. It is 1.25x faster" in slower.verdict
    of_data = slower.to_dict()["measured"]
    assert of_data["unplaced_wall_median_s"] == of_data["single_device_step_s"] == alone_s


# --- models whose ops cannot be placed


class Loop(nn.Module):
    """Runs as many iterations as its data requires."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() < 100:
            x = 2 * x + self.grow(x)
        output: Tensor = self.head(x)
        return output


def looped(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return scale * torch.randn(4, 8), torch.randn(4, 3)


def loop() -> Workload:
    torch.manual_seed(1)
    return Workload.of(Loop(), looped(), tiny_models.squared)


def assert_computes_alike(
    step: Workload,
    placement: placer.Result | Placement,
    batches: Sequence[Sequence[Any]],
    **how: Any,
) -> None:
    """Assert that the applied model has the loss and gradients of the model on all batches."""
    assert step.loss is not None
    own, plain = copy.deepcopy(step.model), copy.deepcopy(step.model)
    with placer.apply(own, placement, step.inputs, loss=step.loss, **how) as placed:
        assert isinstance(placed, UnplacedModel) is placement_of(placement).unplaced
        for *inputs, target in batches:
            plain.zero_grad()
            own.zero_grad()
            expected = step.loss(plain(*inputs), target)
            torch.autograd.backward(expected)
            torch.testing.assert_close(placed.step(*inputs, target), expected.detach())
            for (name, parameter), (_, there) in zip(
                own.named_parameters(), plain.named_parameters(), strict=True
            ):
                torch.testing.assert_close(parameter.grad, there.grad, msg=name)


def placement_of(placement: placer.Result | Placement) -> Placement:
    return placement.placement if isinstance(placement, placer.Result) else placement


@pytest.mark.slow_repeats
@pytest.mark.parametrize("devices", [ONE, BOTH])
def test_a_model_whose_ops_cannot_be_placed_is_measured_and_applied_unplaced(
    devices: str, tmp_path: Path
) -> None:
    step = loop()
    result = found(step, devices, "dispatch")
    names = ["unplaced", f"unplaced {ONE}"][: len(devices.split(","))]
    assert [each.name for each in result.candidates] == names
    assert all(each.measurement and each.measurement.ok for each in result.candidates)
    assert result.verdict.startswith("Leave the model unplaced, on core:")
    assert "ops of Loop cannot be placed on pinned cores" in result.verdict
    assert "extractor modules" in result.verdict
    assert not any("cannot be placed on pinned cores" in each for each in result.remarks)
    result.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json")
    assert read.unplaced
    batches = [looped(), looped(0.01), looped(50.0)]
    assert_computes_alike(step, result, batches)
    for each in result.candidates:
        assert_computes_alike(step, each.placement, batches, extractor="dispatch")
    evaluation = placer.evaluate(
        read, step, backend="measured", extractor="dispatch", progress=False
    )
    assert evaluation.feasible, evaluation.why


@pytest.mark.slow
def test_what_cannot_be_placed_has_no_placement_that_is_only_predicted() -> None:
    step = loop()
    result = found(step, BOTH, "dispatch", measure=False)
    assert result.best.is_unplaced
    assert result.placement.unplaced
    assert result.best.measurement is None
    assert_computes_alike(step, result, [looped(0.01)])


@pytest.mark.slow
def test_pins_and_replicas_are_refused_where_ops_cannot_be_placed() -> None:
    search = placer.SearchConfig(budget="20e", policy=None)
    constraints = placer.Constraints(pins={"head": ONE})
    wishes: list[tuple[str, dict[str, Any]]] = [
        ("pins are", {"constraints": constraints}),
        ("replicas are planned", {"replicas": 2}),
    ]
    for reason, wish in wishes:
        with pytest.raises(
            (ConstraintError, ExtractionError),
            match=f"^{reason} .* cannot be placed on pinned cores",
        ):
            placer.optimize(
                loop(), BOTH, search=search, extractor="dispatch", progress=False, **wish
            )
    with pytest.raises(ExtractionError, match=r"^replicas are .* the graph of Loop is of its mod"):
        placer.optimize(loop(), BOTH, search=search, replicas=2, progress=False)


@pytest.mark.slow
def test_a_placement_of_ops_that_cannot_be_placed_fails_when_it_is_measured() -> None:
    step = loop()
    result = found(step, BOTH, "dispatch")
    placed = replace(result.candidates[1].placement, unplaced=False)
    evaluation = placer.evaluate(
        placed, step, backend="measured", extractor="dispatch", progress=False
    )
    assert not evaluation.feasible
    assert "cannot be placed on pinned cores" in evaluation.why


TARGET = """
import torch
from torch import nn

class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return x * 2 if x.sum() > 0 else x

def build():
    torch.manual_seed(0)
    return Doubling(), (torch.randn(3, 4), torch.randn(3, 4)), nn.MSELoss()
"""


@pytest.mark.slow
def test_commands_place_and_run_a_model_whose_ops_cannot_be_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(TARGET)
    target, path = f"{tmp_path / 'model.py'}:build", str(tmp_path / "placement.json")
    assert main(["optimize", target, "--devices", BOTH, "--budget", "20e", "--out", path]) == 0
    shown = capsys.readouterr().out
    assert "unplaced" in shown
    written = json.loads(Path(path).read_text())
    assert set(written["devices"]) >= {"linear:Linear", ":Doubling"}
    split = {op: BOTH.split(",")["linear" in op] for op in written["devices"]}
    for placement in (written, written | {"unplaced": False, "devices": split}):
        Path(path).write_text(json.dumps(placement))
        assert main(["show", path]) == 0
        assert ("left unplaced" in capsys.readouterr().out) is placement.get("unplaced", False)
        assert main(["run", target, "--placement", path, "--steps", "2", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["losses"]) == 2
