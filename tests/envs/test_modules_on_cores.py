"""Graphs of modules on pinned cores: one thread runs the model's own code and moves."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from envs.backend import StepResult
from envs.core_runtime import CoreRuntime
from envs.executors.modules_on_cores import ModulesOnCores
from envs.executors.process_settings import with_threads
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Link
from envs.hardware.discover import cores_of, discover, present
from envs.measured import Measured
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.costs import with_costs
from graphs.extract import Workload, extract
from graphs.extract.module_calls import module_paths
from graphs.graph import GraphArrays
from graphs.workload import step_copy
from tests.helpers import tiny_models

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
FIRST, SECOND = (CORES[0],), (CORES[-1],)
BOTH = f"core:{CORES[0]},core:{CORES[-1]}"


class Normed(nn.Module):
    """Keeps a loss of its own in an attribute, and appends to the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.own_loss: Tensor | None = None

    def forward(self, x: Tensor, *, seen: list[Tensor]) -> dict[str, Tensor]:
        x = self.linear(x)
        self.own_loss = x.square().mean()
        seen.append(self.drop(self.relu(self.norm(x))))
        return {"x": seen[-1]}


class Foreign(nn.Module):
    """Has as many iterations as its data requires, modules called again, state of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Normed(), nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        seen: list[Tensor] = []
        while x.norm() < 30:
            x = 2 * x + self.layer(x, seen=seen)["x"]
        assert self.layer.own_loss is not None
        output: Tensor = self.head(x + sum(seen)) + self.layer.own_loss
        return output


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return scale * torch.randn(6, 8), torch.randn(6, 3)


def foreign() -> Workload:
    torch.manual_seed(1)
    return Workload.of(Foreign(), batch(), tiny_models.squared)


def in_turn(step: Workload) -> dict[str, tuple[int, ...]]:
    """Return the modules of a step on both cores in turn."""
    paths = module_paths(step).values()
    return {path: (FIRST, SECOND)[i % 2] for i, path in enumerate(paths)}


@pytest.fixture
def placed() -> Iterator[ModulesOnCores]:
    step = foreign()
    with ModulesOnCores(extract(step, "modules"), in_turn(step)) as placed:
        assert isinstance(placed, ModulesOnCores)
        yield placed


def test_results_state_and_random_numbers_are_those_of_eager_mode(placed: ModulesOnCores) -> None:
    own, alone = placed._step.model, foreign().model
    assert isinstance(own, Foreign)
    assert isinstance(alone, Foreign)
    for scale in (1.0, 0.1, 3.0):
        inputs, target = batch(scale)
        for backward_by_hand in (False, True):
            torch.manual_seed(2)
            expected = tiny_models.squared(alone(inputs), target)
            torch.autograd.backward(expected)
            torch.manual_seed(2)
            if backward_by_hand:  # as the loop of data parallel training does
                loss: Tensor = placed(inputs, target)
                torch.autograd.backward(loss)
            else:
                loss = placed.step(inputs, target)
            assert torch.equal(loss, expected)
            assert os.sched_getaffinity(0) == set(CORES)
    for mine, others in zip(own.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert others.grad is not None
        assert torch.equal(mine.grad, others.grad)
    for one, other in zip(own.buffers(), alone.buffers(), strict=True):
        assert torch.equal(one, other)
    assert own.calls == alone.calls
    placed.eval()
    alone.eval()
    assert torch.equal(placed.step(batch()[0]), alone(batch()[0]))


def test_every_module_and_its_backward_pass_run_on_its_core(placed: ModulesOnCores) -> None:
    seen: set[tuple[str, int]] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.update((name, core) for core in os.sched_getaffinity(0))

    paths, where = module_paths(placed._step), in_turn(placed._step)
    for module, path in paths.items():
        if next(module.children(), None) is None:
            module.register_forward_hook(note(path), prepend=True)

            def watched(_: nn.Module, __: Any, output: Tensor, path: str = path) -> None:
                assert output.grad_fn is not None
                hook = output.grad_fn.register_hook  # prehooks would see where it was before
                hook(note(f"backward of {path}"))

            module.register_forward_hook(watched, prepend=True)
    placed.step(*batch())
    leaves = [path for module, path in paths.items() if not list(module.children())]
    expected = {(path, *where[path]) for path in leaves}
    assert seen == expected | {(f"backward of {path}", core) for path, core in expected}
    assert {core for _, core in seen} == {CORES[0], CORES[-1]}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("backward", [False, True])
def test_errors_and_interrupts_are_those_of_the_model_and_leave_it_usable(
    placed: ModulesOnCores, error: type[BaseException], backward: bool
) -> None:
    def fail(*_: object) -> None:
        raise error("out of luck")

    relu = placed.get_submodule("layer.relu")

    def soon(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    hook = relu.register_forward_hook(soon) if backward else relu.register_forward_pre_hook(fail)
    with pytest.raises(error, match="out of luck"):
        placed.step(*batch())
    assert os.sched_getaffinity(0) == set(CORES)
    if backward:  # by the caller
        with pytest.raises(error):
            torch.autograd.backward(placed(*batch()))
        assert os.sched_getaffinity(0) == set(CORES)
    hook.remove()
    placed.zero_grad()
    torch.manual_seed(3)
    loss = placed.step(*batch())
    assert os.sched_getaffinity(0) == set(CORES)
    twin = step_copy(placed._step).model  # hooks of copies do nothing
    torch.manual_seed(3)
    assert torch.equal(loss, tiny_models.squared(twin(batch()[0]), batch()[1]))


def test_copies_of_a_placed_model_are_not_kept(placed: ModulesOnCores) -> None:
    copied = copy.deepcopy(placed._step.model)
    copied(batch()[0])
    seen = weakref.ref(copied)
    del copied
    gc.collect()
    assert seen() is None


def test_torch_has_a_thread_for_each_core_of_a_set() -> None:
    step, seen = foreign(), {}
    extraction = extract(step, "modules")

    def note(module: nn.Module, *_: object) -> None:
        seen[type(module).__name__] = torch.get_num_threads(), len(os.sched_getaffinity(0))

    with ModulesOnCores(extraction, {"": FIRST, "head": (CORES[0], CORES[-1])}) as placed:
        for name in ("head", "layer.norm"):
            placed.get_submodule(name).register_forward_hook(note, prepend=True)
        placed.step(*batch())
    assert seen == {"Linear": (2, 2), "BatchNorm1d": (1, 1)}
    assert torch.get_num_threads() == 1


def test_torch_has_as_many_threads_after_a_step_as_before() -> None:
    step = foreign()
    torch.set_num_threads(2)
    try:
        with ModulesOnCores(extract(step, "modules"), {"": CORES, "layer": FIRST}) as placed:
            placed.step(*batch())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_on_one_core_and_after_closing_there_are_no_hooks() -> None:
    step = foreign()
    extraction = extract(step, "modules")
    ModulesOnCores(extraction, in_turn(step)).close()
    with ModulesOnCores(extraction, {"": FIRST}) as placed:
        assert not any(module._forward_hooks for module in placed.modules())
        placed.step(*batch())


# --- the answer


def branches(m: Any, x: Tensor) -> Tensor:
    first, second = m.first(x), m.second(x)
    output: Tensor = first + second if x.sum() > 0 else first - second
    return output


def test_modules_on_two_cores_are_predicted_one_after_the_other() -> None:
    model = tiny_models.Plain(branches, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    extraction = extract(Workload.of(model, torch.ones(2, 8), training=False), "modules")
    link = Link(between=discover(BOTH).names, latency_s=1e-2, bandwidth_bytes_per_s=float("inf"))
    runtime = CoreRuntime(extraction, cluster := replace(discover(BOTH), links=(link,)))
    graph = with_costs(runtime.graph, {"core": np.full(len(runtime.graph), 1e-3)}, {"core": "-"})
    problem = Problem.of(GraphArrays.from_graph(graph), runtime.planned(cluster))
    where = np.array([op.startswith("second") for op in graph], np.int32)
    placement = Placement.of(problem.graph, problem.cluster, where, -np.arange(len(graph)))
    [result] = Simulated(problem).evaluate([placement])
    assert result.step_s == pytest.approx(1e-3 * len(graph) + 1e-2)
    with runtime.backend(problem, rounds=1) as backend:
        [measured] = backend.evaluate([placement])
    assert measured.feasible, measured.why


@pytest.mark.slow
def test_a_model_that_reads_values_is_placed_by_its_modules_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []
    evaluate = Measured.evaluate

    def noting(self: Measured, placements: Sequence[Placement], *how: Any) -> list[StepResult]:
        ran.extend(each.unplaced for each in placements)
        return evaluate(self, placements, *how)

    monkeypatch.setattr(Measured, "evaluate", noting)
    step = foreign()
    search = placer.SearchConfig(budget="50e", policy=None)
    result = placer.optimize(step, BOTH, search=search, progress=False)
    assert {*ran} == {True, False}
    assert not [each.failure for each in result.candidates if each.failure]
    [remark] = [each for each in result.remarks if each.startswith("Whole modules are placed, not")]
    assert "reads values of tensors" in remark
    assert __file__ in remark
    first = result.candidates[0].placement
    assert not first.unplaced
    graph = result.problem.graph
    where, priority = (graph.group % 2).astype(np.int32), np.array(first.priority)
    both = Placement.of(graph, present(BOTH.split(",")), where, priority)
    both.save(tmp_path / "placement.json")
    evaluated = placer.evaluate(both, step, backend="measured", progress=False)
    assert evaluated.feasible, evaluated.why
    unplaced = [each.placement for each in result.candidates if each.placement.unplaced]
    assert {len(cores_of(*each.used_devices)) for each in unplaced} == {1, 2}
    answers: list[tuple[Path | placer.Result | Placement, Placement]] = [
        (tmp_path / "placement.json", both),
        (result, result.placement),
        *((each, each) for each in unplaced),
    ]
    for found, placement in answers:
        model = copy.deepcopy(step.model)
        with placer.apply(model, found, step.inputs, loss=step.loss) as placed:
            assert isinstance(placed, UnplacedModel if placement.unplaced else ModulesOnCores)
            torch.manual_seed(2)
            loss = placed.step(*batch(0.1))
        alone = copy.deepcopy(step.model)
        [threads] = {len(cores_of(name)) for name in placement.used_devices}
        with with_threads(threads):  # their number changes the last bits
            torch.manual_seed(2)
            expected = tiny_models.squared(alone(batch(0.1)[0]), batch(0.1)[1])
        assert torch.equal(loss, expected)
