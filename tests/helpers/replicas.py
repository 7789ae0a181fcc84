"""A small model with difficult parameters, and its data, for tests of replicas."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 4


class Branches(nn.Module):
    """A model with a frozen layer, one that is not always used, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.shared = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.seldom = nn.Linear(16, 4)
        self.last = nn.Linear(16, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, use_seldom: bool = False) -> Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.first(x))))
        hidden = torch.tanh(self.shared(hidden) + self.frozen(hidden))
        out: Tensor = self.last(hidden)
        return out + self.seldom(hidden) if use_seldom else out


def model(seed: int = 0) -> Branches:
    torch.manual_seed(seed)
    return Branches()


def mlp(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)
    )


def batches(number: int, replicas: int, features: int = 6, outputs: int = 4) -> list[list[Tensor]]:
    """Return one batch [inputs, targets] of a step for each replica."""
    torch.manual_seed(1000 + number)
    return [[torch.randn(BATCH, features), torch.randn(BATCH, outputs)] for _ in range(replicas)]


def own_batch(number: int, features: int = 6, outputs: int = 4) -> list[Tensor]:
    """Return the batch of this rank."""
    return batches(number, dist.get_world_size(), features, outputs)[dist.get_rank()]


def mean_gradients(losses: Iterable[Tensor]) -> None:
    """Compute in one process the gradient of the mean loss of all replicas."""
    torch.autograd.backward(torch.stack(list(losses)).mean())


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in module.named_parameters()
    }


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def mse(module: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(module(batch[0]), batch[1])


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)
