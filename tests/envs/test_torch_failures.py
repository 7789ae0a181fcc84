"""Errors after which torch devices are unusable for the process, on fake second ones."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn

from envs.backend import measurements
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware import torch_devices
from envs.measured import DevicesLostError, Measured
from envs.torch_runtime import TorchExecutor
from envs.torch_runtime import executor as executor_module
from graphs.extract import Workload, extract
from graphs.extract.placeable import placeable
from tests.fake_cuda.machine import machine
from tests.helpers import tiny_models
from tests.helpers.clusters import equal_costs
from tests.helpers.on_torch_devices import alternating, everywhere, opened
from tests.helpers.second_devices import FAKES, second

pytestmark = pytest.mark.usefixtures("second_device")
ON_FAKE_CUDA = pytest.mark.parametrize("second_device", FAKES, indirect=True)


def breaks_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this step fail with an error after which every call of the device fails, as of CUDA."""
    steps = itertools.count(1)
    forward = PlacedModule.forward
    error = torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with ...")

    def failing(module: PlacedModule, *inputs: object, **keywords: object) -> object:
        if next(steps) == number:
            monkeypatch.setattr(torch_devices, "release", fails)
            raise error
        return forward(module, *inputs, **keywords)

    def fails(device: torch.device) -> None:
        if device != torch_devices.CPU:
            raise error

    monkeypatch.setattr(executor_module, "MOST_WARM_UP", 0)  # a step is a turn
    monkeypatch.setattr(PlacedModule, "forward", failing)


class Locked(nn.Linear):
    """A model that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_ends_the_runs_with_a_sentence() -> None:
    step = Workload.of(Locked(), torch.randn(2, 4), training=False)
    with pytest.raises(DevicesLostError, match=r"cannot be copied: .*_thread\.lock"):
        opened(step)


def test_after_an_error_that_leaves_the_gpu_unusable_candidates_without_it_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unusable = f"{second()} cannot be used: CUDA error: device-side assert triggered"
    step, random = tiny_models.conv_net(), torch.get_rng_state()
    breaks_at(1, monkeypatch)
    with opened(step) as backend:
        placements = [everywhere(backend.problem, device) for device in (0, 1, 0)]
        for _ in range(2):
            first, on_cpu, third = measurements(backend.evaluate(placements))
            assert [first.failure, third.failure] == [unusable] * 2
            assert on_cpu.ok, on_cpu.failure
    assert torch.equal(torch.get_rng_state(), random)


def test_turns_of_others_count_before_and_after_such_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks_at(4, monkeypatch)  # the second turn of the first one; rounds begin with another
    with opened(tiny_models.conv_net(), rounds=3) as backend:
        placements = [everywhere(backend.problem, device) for device in range(2)]
        first, on_cpu = measurements(backend.evaluate(placements))
    assert "device-side assert" in first.failure
    assert on_cpu.ok, on_cpu.failure
    assert on_cpu.wall_s.shape == (3,)


@ON_FAKE_CUDA
def test_an_index_out_of_range_on_a_gpu_fails_with_a_sentence() -> None:
    step = tiny_models.tied_weights()
    tokens, target = step.inputs
    random = torch.get_rng_state()
    with opened(Workload.of(step.model, (tokens, target), step.loss)) as backend:
        executor = backend.executor
        assert isinstance(executor, TorchExecutor)
        there = everywhere(backend.problem, 0)
        assert measurements(backend.evaluate([there]))[0].ok
        executor._extraction.step.inputs[0].add_(10_000)  # no longer in the table
        (failed,) = measurements(backend.evaluate([there]))
        assert failed.failure.startswith("cuda:0 cannot be used: CUDA error: device-side assert")
    assert torch.equal(torch.get_rng_state(), random)


# --- memory


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("second_device", "overlap"),
    [("fake cuda 0", False), ("fake cuda 1", True)],
    indirect=["second_device"],
)
def test_a_placement_over_the_limit_of_a_device_fails_and_the_others_go_on(overlap: bool) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    step = Workload.of(model, (torch.randn(8, 256), torch.randn(8, 256)), nn.MSELoss())
    needed = sum(2 * p.nbytes for p in model.parameters())  # with gradients
    extraction = extract(step)
    calls = placeable(extraction)
    problem = equal_costs(calls.graph)
    for share, expected in ((0.9, False), (1.5, True)):
        executor = TorchExecutor(
            extraction,
            calls,
            problem,
            limits={"cuda:0": int(share * needed)},
            overlap=overlap,
        )
        with Measured(executor, rounds=2, warm_up=0) as backend:
            before = torch.cuda.get_per_process_memory_fraction(0)
            placements = [everywhere(problem, 0), alternating(problem), everywhere(problem, 1)]
            whole, _, fine = measurements(backend.evaluate(placements))
            assert before < 1
        assert whole.ok is expected
        assert whole.overfull is not expected
        assert fine.ok, fine.failure
        assert fine.peak_memory_bytes["cuda:0"] < needed / 10
        reserved = whole.reserved_memory_bytes["cuda:0"]
        assert whole.peak_memory_bytes["cuda:0"] <= reserved <= int(share * needed)
        if expected:
            assert needed <= whole.peak_memory_bytes["cuda:0"]
        assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
        assert torch.cuda.memory_allocated(0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("second_device", FAKES[:1], indirect=True)
def test_gaps_between_tensors_count_against_a_limit_and_are_told() -> None:
    segment = 1 << 20
    machine().allocators[0].segment_bytes = segment
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(2)))
    step = Workload.of(model, (torch.randn(8, 300), torch.randn(8, 300)), nn.MSELoss())
    needed = sum(2 * p.nbytes for p in model.parameters())  # with gradients
    assert segment < needed < 2 * segment, "two of the four fit in a segment"
    extraction = extract(step)
    calls = placeable(extraction)
    problem = equal_costs(calls.graph)
    for limit, expected in ((int(1.9 * segment), False), (2 * segment, True)):
        executor = TorchExecutor(extraction, calls, problem, limits={"cuda:0": limit})
        with Measured(executor, rounds=1, warm_up=0) as backend:
            (whole,) = measurements(backend.evaluate([everywhere(problem, 0)]))
        assert whole.ok is expected, whole.failure
        peak, reserved = (
            peaks["cuda:0"] for peaks in (whole.peak_memory_bytes, whole.reserved_memory_bytes)
        )
        assert peak < needed + 100_000 < 1.9 * segment, "tensors alone would fit"
        assert reserved == (2 * segment if expected else segment)
