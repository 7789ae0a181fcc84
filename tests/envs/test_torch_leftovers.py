"""What a measured placement leaves behind on torch devices must not reach the next one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from envs.backend import measurements
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware import torch_devices
from envs.measured import Measured
from envs.placement import Placement
from envs.torch_runtime import TorchExecutor
from graphs.extract import Workload, extract
from graphs.extract.placeable import call_graph
from graphs.optimizer import Optimizer
from tests.helpers.clusters import equal_costs
from tests.helpers.second_devices import DEVICES, second

pytestmark = [
    pytest.mark.usefixtures("second_device"),
    pytest.mark.parametrize("second_device", DEVICES[:3], indirect=True),
]
CPU = torch.device("cpu")


class Table(nn.Module):
    """A model that holds a constant, and whose gradient at 0 is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.norm(x) * self.weight.abs().sqrt()
        return (scaled + torch.tensor([1.0, 2, 3, 4])).sum()


def everywhere(workload: Workload) -> tuple[TorchExecutor, list[Placement]]:
    """Return an executor, and placements on the CPU and on the second device."""
    extraction = extract(workload)
    calls = call_graph(extraction)
    problem = equal_costs(calls.graph)
    order = -np.arange(float(problem.op_count))
    names = list(problem.cluster.names)
    placements = [
        Placement.of(
            problem.graph, problem.cluster, np.full(problem.op_count, names.index(name)), order
        )
        for name in ("cpu", str(second()))
    ]
    return TorchExecutor(extraction, calls, problem), placements


@pytest.mark.slow_repeats
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_updates_by_gradients_that_are_not_finite_do_not_reach_the_next_step(
    optimizer: str,
) -> None:
    model = Table()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    workload = Workload.of(model, (torch.randn(3, 4),), optimizer=Optimizer.of(optimizer))
    executor, (on_cpu, there) = everywhere(workload)
    seen: list[Tensor] = []
    run = executor._step

    def first_seen(module: Any) -> float:
        seen.append(next(iter(module.parameters())).detach().cpu().clone())
        return run(module)

    executor._step = first_seen  # type: ignore[method-assign]  # notes the state first
    with Measured(executor, rounds=1, warm_up=0) as backend:
        for placement in (on_cpu, there):
            assert measurements(backend.evaluate([placement]))[0].ok
            assert len(seen) > 1
            assert not any(weight.any() for weight in seen), "0 times infinity"
            seen.clear()
        executor._clear()
        for name, tensor in executor._extraction.step.named_state().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.slow_repeats
def test_constants_are_only_on_devices_in_use() -> None:
    executor, (on_cpu, there) = everywhere(Workload.of(Table(), (torch.randn(3, 4),)))
    with Measured(executor, rounds=1, warm_up=0) as backend:
        for placement, device in ((there, second()), (on_cpu, CPU)):
            assert measurements(backend.evaluate([placement]))[0].ok
            assert isinstance(executor._placed, PlacedModule)
            assert executor._placed._constants.keys() == {device}
            assert executor._placed._constants[device]
        placed = executor._placed
        assert isinstance(placed, PlacedModule)
        executor._clear()
        assert not placed._constants, "as while the unplaced model runs"


@pytest.mark.slow_repeats
def test_tensors_in_reference_cycles_are_gone_before_the_next_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    forward = PlacedModule.forward

    def leaving(module: PlacedModule, *inputs: object, **keywords: object) -> object:
        alive.append(any(own() is not None for own in left))
        cycle: list[Any] = [torch.ones(8)]
        cycle.append(cycle)
        left.append(weakref.ref(cycle[0]))
        return forward(module, *inputs, **keywords)

    executor, placements = everywhere(Workload.of(Table(), (torch.randn(3, 4),)))
    monkeypatch.setattr(PlacedModule, "forward", leaving)
    monkeypatch.setattr("envs.torch_runtime.executor.MOST_WARM_UP", 0)
    monkeypatch.setattr("envs.torch_runtime.executor.TURN_S", 0.0)
    gc.disable()
    try:
        with Measured(executor, rounds=1, warm_up=0) as backend:
            assert all(one.ok for one in measurements(backend.evaluate(placements)))
    finally:
        gc.enable()
    assert alive == [False, False]


def test_workspaces_and_page_locked_memory_are_released_with_cached_memory() -> None:
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
            patch.setattr(torch._C, name, lambda name=name: called.append(name), raising=False)
        patch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
        torch_devices.release(torch.device("cuda", 0))
        assert called == ["_cuda_clearCublasWorkspaces", "_host_emptyCache", "empty_cache"]
        for name in called[:2]:
            patch.delattr(torch._C, name)
        torch_devices.release(torch.device("cuda", 0))
        torch_devices.release(CPU)
        assert len(called) == 4
