"""Usual training of placed modules: any optimizer, clipping, scalers, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from tests.helpers import tiny_models
from tests.helpers.placed_steps import random_devices
from tests.helpers.tiny_models import state_of

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("second_device")

Make: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
    "adamw, foreach": lambda own: torch.optim.AdamW(own, lr=0.01, foreach=True, amsgrad=True),
    "adamw, fused": lambda own: torch.optim.AdamW(own, lr=0.01, fused=True),
    "adafactor": torch.optim.Adafactor,
}


def two_devices() -> list[torch.device]:
    return [torch.device("cpu"), torch.device("vdev", 0)]


def placed_and_plain(make: Callable[[], Workload], seed: int = 1) -> tuple[PlacedModule, Workload]:
    extraction = extract(make())
    plain = copy.deepcopy(extraction.step)
    return PlacedModule(extraction, random_devices(extraction, two_devices(), seed)), plain


def loss_of(step: Workload) -> Tensor:
    """Return the loss as a user computes it, within the current contexts."""
    assert step.loss is not None
    return step.loss(step.model(*step.model_inputs), step.inputs[-1])


def both(placed: PlacedModule, plain: Workload) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
    """Return the model and the placed module, each with a function that computes its loss."""
    return [(plain.model, lambda: loss_of(plain)), (placed, lambda: placed(*plain.inputs))]


def assert_state(placed: PlacedModule, plain: Workload, tolerance: float = 1e-6) -> None:
    here = {name: own.detach().cpu() for name, own in placed.state_dict().items()}
    expected = {name: own for name, own in state_of(plain).items() if name in here}
    torch.testing.assert_close(here, expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_trains_it_as_it_does_the_model(make: Make) -> None:
    placed, plain = placed_and_plain(tiny_models.conv_net)
    assert {own.device.type for own in placed.parameters()} == {"cpu", "vdev"}
    for module, run in both(placed, plain):
        optimizer = make(module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(run())
            optimizer.step()
    assert_state(placed, plain)


def test_scaled_and_clipped_steps_under_autocast_span_devices() -> None:
    placed, plain = placed_and_plain(tiny_models.conv_net)
    norms: list[float] = []
    for module, run in both(placed, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16), torch.autocast("vdev", torch.bfloat16):
                loss = run()
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**10
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-2)
    assert_state(placed, plain, 1e-3)
