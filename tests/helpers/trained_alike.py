"""Comparison of the training of a placed module with that of its model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from envs.executors.cores.placed_model import PlacedModel
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from graphs.extract import Workload
from graphs.optimizer import Optimizer
from tests.helpers.tiny_models import forward


def assert_trains_alike(
    step: Workload,
    placed: PlacedModel | PlacedModule | HookedModule | UnplacedModel,
    *,
    run: Callable[..., Any] | None = None,
    steps: int = 3,
    tolerance: float = 1e-6,
    rate: float = 0.01,
) -> None:
    """Assert that losses, gradients, parameters and buffers of some SGD steps equal the model's.

    ``step`` is on the CPU and is not changed; ``run`` returns the loss of a step, by default
    ``placed`` does.
    """
    module = placed.model if isinstance(placed, PlacedModel) else placed
    plain = copy.deepcopy(step)
    plain_sgd = torch.optim.SGD(plain.model.parameters(), lr=rate)
    placed_sgd = torch.optim.SGD(module.parameters(), lr=rate)
    for number in range(steps):
        plain_sgd.zero_grad()
        placed_sgd.zero_grad()
        torch.manual_seed(number)
        expected = forward(plain)
        expected.backward()
        torch.manual_seed(number)
        if isinstance(placed, PlacedModel):
            loss = placed.step(*step.inputs, **step.keywords)
        else:
            loss = (placed if run is None else run)(*step.inputs, **step.keywords)
            loss.backward()
        assert_close(loss.detach(), expected.detach(), tolerance)
        assert_close(on_cpu(gradients(module)), on_cpu(gradients(plain.model)), tolerance)
        plain_sgd.step()
        placed_sgd.step()
    assert_close(on_cpu(module.state_dict()), on_cpu(plain.model.state_dict()), tolerance)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    found = found.cpu() if isinstance(found, Tensor) else found
    torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=tolerance)


def on_cpu(found: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def with_optimizer(step: Workload, kind: str, **numbers: Any) -> Workload:
    return replace(step, optimizer=Optimizer(kind=kind, **numbers))


def torch_optimizer(
    model: nn.Module, own: Optimizer, *, fused: bool = True
) -> torch.optim.Optimizer:
    numbers: dict[str, Any] = {"lr": own.learning_rate, "fused": fused}
    if own.weight_decay is not None:
        numbers["weight_decay"] = own.weight_decay
    match own.kind:
        case "sgd":
            return torch.optim.SGD(model.parameters(), **numbers)
        case "momentum":
            return torch.optim.SGD(model.parameters(), momentum=own.momentum, **numbers)
        case "adam":
            return torch.optim.Adam(model.parameters(), **numbers)
    return torch.optim.AdamW(model.parameters(), **numbers)
