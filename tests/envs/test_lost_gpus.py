"""GPUs that are lost beside others and the CPU while placements run, on fake CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from envs.executors.torch.placed_module import PlacedModule
from envs.hardware import torch_devices
from envs.hardware.discover import discover
from envs.measured import DevicesLostError, Failure, TimedStep
from envs.problem import Problem
from envs.torch_runtime import TorchExecutor
from envs.torch_runtime import executor as executor_module
from graphs.extract import Workload, extract
from graphs.extract.placeable import placeable
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.machine import Machine
from tests.helpers.clusters import equal_costs
from tests.helpers.on_torch_devices import everywhere

MEMORY_BYTES = 1 << 20
LOST = "uncorrectable ECC error encountered"
SENTENCE = f"cuda:1 cannot be used: CUDA error: {LOST}"


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_cuda(2, memory_bytes=MEMORY_BYTES) as made:
        yield made


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MOST_WARM_UP", 0)
    monkeypatch.setattr(executor_module, "MOST_STEPS", 1)


def prepared(names: str = "cuda:0,cuda:1,cpu") -> tuple[Problem, Callable[[], TorchExecutor]]:
    """Return a small step's problem on these devices, and a function that makes its executor."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    extraction = extract(Workload.of(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss()))
    calls = placeable(extraction)
    limits = dict.fromkeys(names.split(","), MEMORY_BYTES // 2)
    problem = equal_costs(calls.graph, discover(names, limits))
    return problem, lambda: TorchExecutor(extraction, calls, problem, limits=limits)


def lose(machine: Machine, number: int) -> None:
    machine.queues.lose(machine.devices[number], LOST)


def reason(result: TimedStep | Failure) -> str:
    return result.reason if isinstance(result, Failure) else ""


def limits_hold(machine: Machine) -> bool:
    return any(allocator.fraction < 1.0 for allocator in machine.allocators)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("device", [0, 2])
def test_a_placement_runs_once_more_if_a_gpu_that_it_does_not_use_is_lost_meanwhile(
    device: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, make = prepared()
    forward = PlacedModule.forward

    def losing(module: PlacedModule, *inputs: Any, **keywords: Any) -> Any:
        lose(machine, 1)
        return forward(module, *inputs, **keywords)

    monkeypatch.setattr(PlacedModule, "forward", losing)
    executor = make()
    assert reason(executor.run(everywhere(problem, device))) == ""
    assert reason(executor.run(everywhere(problem, 1))) == SENTENCE
    executor.close()
    assert machine.allocators[0].fraction == 1.0


def test_a_lost_gpu_has_no_peaks(machine: Machine) -> None:
    problem, make = prepared()
    executor = make()
    there = executor.run(everywhere(problem, 1))
    assert there.peak_memory_bytes["cuda:1"] > 0
    lose(machine, 1)
    other = executor.run(everywhere(problem, 0))
    assert isinstance(other, TimedStep)
    for peaks in (other.peak_memory_bytes, other.reserved_memory_bytes):
        assert {*peaks} == {"cuda:0"}
    executor.close()


def test_a_full_gpu_is_not_lost_by_an_error_of_another(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, make = prepared()
    executor = make()
    held = torch.empty(MEMORY_BYTES // 2, dtype=torch.uint8, device="cuda:1")

    def fails(*_: object) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")

    with monkeypatch.context() as patch:
        patch.setattr(PlacedModule, "forward", fails)
        failed = executor.run(everywhere(problem, 0))
    assert reason(failed) == "torch cannot run it: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"
    del held
    assert reason(executor.run(everywhere(problem, 1))) == ""
    executor.close()


def test_memory_of_the_other_gpus_is_released_after_a_loss(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, make = prepared()
    executor = make()
    lose(machine, 0)
    assert "cuda:0 cannot be used" in reason(executor.run(everywhere(problem, 0)))
    released: list[torch.device] = []
    monkeypatch.setattr(torch_devices, "release", released.append)
    executor.clear()
    assert {*released} == {machine.devices[1], torch_devices.CPU}
    executor.close()


def test_releasing_memory_fails_only_on_a_gpu_that_is_lost_itself(machine: Machine) -> None:
    lose(machine, 1)
    torch_devices.release(machine.devices[0])
    with pytest.raises(torch.AcceleratorError, match="ECC"):
        torch_devices.release(machine.devices[1])


# --- new executors


def test_a_new_executor_goes_on_with_what_is_left(machine: Machine) -> None:
    problem, make = prepared()
    first = make()
    lose(machine, 1)
    assert reason(first.run(everywhere(problem, 1))) == SENTENCE
    first.close()
    again = make()
    assert [reason(again.run(everywhere(problem, device))) for device in range(3)] == [
        "",
        SENTENCE,
        "",
    ]
    again.close()
    assert machine.allocators[0].fraction == 1.0


def test_a_new_executor_without_any_device_left_ends_with_a_sentence(machine: Machine) -> None:
    _, make = prepared("cuda:0,cuda:1")
    for number in range(2):
        lose(machine, number)
    with pytest.raises(
        DevicesLostError, match=f"^cuda:0, cuda:1 cannot be used: CUDA error: {LOST}$"
    ):
        make()
    assert not limits_hold(machine)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: unknown error\nCompile with ..."), DevicesLostError),
        (RuntimeError("no generator"), RuntimeError),
    ],
    ids=["of CUDA", "other"],
)
def test_limits_end_with_an_executor_that_cannot_be_made(
    error: Exception,
    expected: type[Exception],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, make = prepared()

    def fails(_: object) -> None:
        assert limits_hold(machine)
        raise error

    monkeypatch.setattr(torch_devices, "forked_rng", fails)
    with pytest.raises(expected, match=r"^(CUDA error: unknown error|no generator)$"):
        make()
    assert not limits_hold(machine)
