"""Usual training of placed modules and of the unplaced one: optimizers, clipping, scalers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from graphs.extract import extract
from tests.helpers import tiny_models
from tests.helpers.placed_steps import random_devices
from tests.helpers.tiny_models import forward
from tests.helpers.trained_alike import assert_close, with_optimizer

pytestmark = pytest.mark.usefixtures("second_device")


@pytest.mark.slow_repeats
@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize(
    ("names", "scales"),
    # between a GPU and the CPU torch's scaler reads copies that it has not waited for
    [(("cpu", "cuda:0"), False), (("cuda:0", "cuda:1"), True)],
)
def test_scaled_and_clipped_steps_under_autocast_span_devices(
    names: tuple[str, ...], scales: bool, option: str
) -> None:
    extraction = extract(tiny_models.conv_net())
    plain = copy.deepcopy(extraction.step)
    devices = random_devices(extraction, names, 1)
    placed = PlacedModule(extraction, devices)
    assert {str(own.device) for own in placed.parameters()} == set(names)
    norms: list[float] = []
    runs: list[tuple[nn.Module, str, Callable[[], Tensor]]] = [
        (plain.model, "cpu", lambda: forward(plain)),
        (placed, "cuda", lambda: placed(*plain.inputs)),
    ]
    for module, kind, run in runs:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, **{option: True})
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, enabled=scales)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
                loss = run()
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**10 if scales else 1.0)
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-2)
    state = {name: own.detach().cpu() for name, own in placed.state_dict().items()}
    assert_close(state, dict(plain.model.state_dict()), 1e-3)


def test_a_batch_that_is_refused_is_no_step_of_the_optimizer() -> None:
    step = with_optimizer(tiny_models.conv_net(), "adam")
    extraction = extract(step)
    placed = PlacedModule(extraction, random_devices(extraction, ("cpu", "cuda:0"), 1))
    placed.step(*step.inputs)
    before = placed.optimizer_state()
    with pytest.raises(ValueError, match="shape"):
        placed.step(*(own[:1] for own in step.inputs))
    assert_close(placed.optimizer_state(), before, 0.0)


def test_a_model_unplaced_on_the_cpu_takes_batches_and_state_from_elsewhere() -> None:
    step = tiny_models.conv_net()
    with UnplacedModel(extract(copy.deepcopy(step))) as unplaced:
        expected = forward(step).detach()
        unplaced.to("cuda:0")
        found = unplaced.step(*(own.to("cuda:0") for own in step.inputs))
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, expected)
