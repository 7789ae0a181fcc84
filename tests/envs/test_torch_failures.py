"""Errors after which torch devices are unusable for the process, on a fake second one."""

from __future__ import annotations

import itertools

import pytest
import torch

from envs.backend import measurements
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware import torch_devices
from envs.measured import DevicesLostError
from envs.torch_runtime import executor as executor_module
from tests.helpers import tiny_models
from tests.helpers.on_torch_devices import everywhere, opened

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("second_device")


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

    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(executor_module, "MOST_WARM_UP", 0)  # a step is a turn
    monkeypatch.setattr(PlacedModule, "forward", failing)


def test_after_an_error_that_leaves_the_devices_unusable_all_others_fail_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unusable = f"{executor_module.UNUSABLE}: CUDA error: device-side assert triggered"
    step, random = tiny_models.conv_net(), torch.get_rng_state()
    breaks_at(1, monkeypatch)
    with opened(step) as backend:
        placements = [everywhere(backend.problem, device) for device in (0, 1, 0)]
        first, *others = measurements(backend.evaluate(placements))
        assert first.failure == "torch cannot run it: CUDA error: device-side assert triggered"
        assert [one.failure for one in others] == [unusable] * 2
        again = measurements(backend.evaluate(placements))
        assert [one.failure for one in again] == [unusable] * 3
    assert torch.equal(torch.get_rng_state(), random)


def test_turns_before_such_an_error_count(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks_at(4, monkeypatch)  # the second turn of the first one; rounds begin with another
    with opened(tiny_models.conv_net(), rounds=3) as backend:
        placements = [everywhere(backend.problem, device) for device in range(2)]
        first, second = measurements(backend.evaluate(placements))
    assert "device-side assert" in first.failure
    assert second.ok, second.failure
    assert second.wall_s.shape == (2,)


def test_new_runs_on_unusable_devices_end_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch_devices, "limited", fails)
    with pytest.raises(DevicesLostError, match="unusable for this process: CUDA error: device"):
        opened(tiny_models.conv_net())
