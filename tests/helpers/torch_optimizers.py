"""Steps with an optimizer, and the same optimizers in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphs.extract import Workload
from graphs.optimizer import Optimizer


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
