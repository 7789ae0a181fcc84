"""Hooked copies of small models, with their modules on given devices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from envs.executors.hooks.hooked_module import HookedModule
from graphs.extract import Workload, extract
from tests.helpers import tiny_models
from tests.helpers.tiny_models import Plain


def placed_at(
    step: Workload, devices: Mapping[str, torch.device | str]
) -> tuple[Workload, HookedModule]:
    """Return the step and a hooked copy of it with its modules on these devices."""
    return step, HookedModule(extract(copy.deepcopy(step), "modules"), devices)


def two_linear(function: Any, **modules: nn.Module) -> Workload:
    """Return a step of ``function`` with two linear layers and the given modules."""
    torch.manual_seed(0)
    model = Plain(function, first=nn.Linear(4, 4), second=nn.Linear(4, 4), **modules)
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), tiny_models.squared)
