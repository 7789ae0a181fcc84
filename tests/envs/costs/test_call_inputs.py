"""Inputs of calls that are timed on a GPU: its cache holds what it holds in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from envs.costs import call_inputs
from envs.costs import calls as of_calls
from envs.costs.call_inputs import MOST_COPIES, turns
from envs.costs.calls import profile_calls
from envs.costs.ops import node_signatures
from envs.executors.torch.updates import fused_update
from envs.hardware.cluster import Device
from envs.hardware.torch_devices import CPU, cache_bytes
from graphs.extract import Workload, extract
from graphs.extract.export.forward import ForwardCall
from graphs.extract.placeable import call_graph
from graphs.optimizer import Optimizer
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.cuda_module import CACHE_BYTES
from tests.fake_cuda.tensors import CudaTensor

WIDTH = 64
WEIGHT_BYTES = WIDTH * WIDTH * 4
GPU = Device(name="cuda:0", kind="fake", memory_bytes=1 << 30)


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with fake_cuda():
        yield


def _linear(optimizer: str = "sgd") -> Workload:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    inputs = (torch.randn(32, WIDTH), torch.randn(32, WIDTH))
    return Workload.of(model, inputs, nn.MSELoss(), optimizer=Optimizer.of(optimizer))


def _profile(workload: Workload) -> None:
    extraction = extract(workload)
    profile_calls(extraction, call_graph(extraction), [GPU])


def _address(tensor: torch.Tensor) -> int:
    assert isinstance(tensor, CudaTensor)
    return tensor.place.memory.data_ptr()


def assert_read_from_memory(addresses: list[int], size: int) -> None:
    """Check that between two reads of one tensor others as large as the cache are read."""
    last: dict[int, int] = {}
    for position, address in enumerate(addresses):
        if address in last:
            others = {*addresses[last[address] + 1 : position]}
            assert len(others) * size >= CACHE_BYTES
        last[address] = position
    assert len(last) > 1


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the addresses of what each timed call of ``linear`` reads."""
    addresses: list[list[int]] = []
    real = call_inputs.bound

    def noted(call: ForwardCall, values: dict[int, torch.Tensor], device: torch.device) -> Any:
        work = real(call, values, device)
        if call.op != "linear":
            return work

        def noting() -> object:
            addresses.append([_address(values[value]) for value in call.reads])
            return work()

        return noting

    monkeypatch.setattr(of_calls, "bound", noted)
    return addresses


def test_repeated_calls_read_parameters_from_memory_and_activations_from_the_cache(
    read: list[list[int]],
) -> None:
    step = _linear()
    _profile(Workload.of(step.model, step.inputs[:1], training=False))
    inputs, weights = zip(*read, strict=True)
    assert len(set(inputs)) == 1
    assert_read_from_memory(list(weights), WEIGHT_BYTES)


def test_repeated_backward_passes_read_from_memory_what_the_forward_pass_read(
    read: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_calls, "calls_per_burst", lambda _: 8)
    monkeypatch.setattr(of_calls._Profiler, "_time", lambda *_: of_calls.NONE)  # of forward passes
    monkeypatch.setattr(of_calls._Profiler, "_held_bytes", lambda *_: 1)  # makes one more pass
    _profile(_linear())
    for addresses in zip(*read, strict=True):
        assert_read_from_memory(list(addresses), WEIGHT_BYTES + 32 * WIDTH * 4)


def test_repeated_updates_read_the_state_of_the_optimizer_from_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[list[int]] = []
    real = fused_update

    def noted(*args: Any) -> None:
        parameters, gradients, state = args[2:5]
        read.append([_address(t) for t in (*parameters, *gradients, *state[0])])
        real(*args)

    monkeypatch.setattr(of_calls, "fused_update", noted)
    _profile(_linear("adam"))
    parameters, gradients, *states = zip(*read, strict=True)
    assert len(set(parameters)) == len(set(gradients)) == 1
    for addresses in states:
        assert_read_from_memory(list(addresses), 2 * WEIGHT_BYTES)


def test_copies_fill_the_cache_and_no_more() -> None:
    values = {0: torch.zeros(250), 1: torch.zeros(1000)}
    rows = turns(values, [0], 4000)
    assert rows[0] is values
    assert [len({id(row[key]) for row in rows}) for key in (0, 1)] == [5, 1]
    for cold, cache in (([], 4000), ([0], 0), ([0], 1000 * MOST_COPIES + 1), ([1], 1999)):
        assert turns(values, cold, cache) == [values]
    assert len(turns(values, [1], 2000)) == 2


def test_only_gpus_have_a_cache_to_leave() -> None:
    assert cache_bytes(torch.device("cuda", 0)) == CACHE_BYTES
    assert cache_bytes(CPU) == 0


def test_a_call_that_has_no_room_for_copies_is_timed_without() -> None:
    torch.cuda.set_per_process_memory_fraction(
        4 * WEIGHT_BYTES / torch.cuda.get_device_properties(0).total_memory, 0
    )
    extraction = extract(_linear())
    costs = profile_calls(extraction, call_graph(extraction), [GPU])["fake"]
    assert (costs >= 0).all()  # and none is nan


@pytest.mark.slow
def test_products_of_activations_are_other_calls_than_those_with_parameters() -> None:
    class Product(nn.Module):
        def __init__(self, *, owned: bool) -> None:
            super().__init__()
            self.owned = owned
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.weight if self.owned else y)

    found = []
    for owned in (True, False):
        model = Product(owned=owned)
        step = Workload.of(model, (torch.ones(4, 4), torch.ones(4, 4)), training=False)
        extraction = extract(step)
        found.append(node_signatures(extraction, call_graph(extraction)))
    assert len(found[0]) == len(found[1]) == 1
    assert found[0] != found[1]
