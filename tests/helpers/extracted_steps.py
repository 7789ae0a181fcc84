"""Extractions of the tiny steps, each with its own copy of the model, and simple placements."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from envs.executors.hooks.hooked_module import HookedModule
from graphs.extract import Extraction, Workload, extract
from graphs.optimizer import Optimizer
from tests.helpers import tiny_models, tiny_reference_models, tiny_transformers
from tests.helpers.tiny_models import Plain

STEPS: dict[str, Callable[[], Workload]] = {
    **tiny_models.STEPS,
    **tiny_reference_models.STEPS,
    **tiny_transformers.STEPS,  # dropout is on
    "inception": functools.partial(tiny_models.inception, dropout=0.3),
    "rnnlm": functools.partial(tiny_reference_models.rnnlm, dropout=0.3),
    "nasnet": functools.partial(tiny_reference_models.nasnet, dropout=0.3),
}
FURTHER: dict[str, Callable[[], Workload]] = {"gru": tiny_models.gru}
"""Steps that not every test of all steps takes."""
DOUBLE = ("inception", "nasnet")
"""Batch norm over few tiny images magnifies rounding errors: gradients reach 600."""


def extracted(name: str, extractor: str = "auto", optimizer: Optimizer | None = None) -> Extraction:
    """Return the extraction that all tests of this process share."""
    return _extracted(name, extractor, optimizer)


@functools.cache
def _extracted(name: str, extractor: str, optimizer: Optimizer | None) -> Extraction:
    return extract(replace(made(name), optimizer=optimizer), extractor)


@functools.cache
def without_dropout(name: str) -> Extraction:
    """Return the extraction of a transformer that trains, for tests that do not change it."""
    return extract(tiny_transformers.without_dropout(name))


@functools.cache
def of_reference(name: str, training: bool) -> Extraction:
    """Return the extraction of a reference model, for tests that do not change it."""
    torch.manual_seed(0)
    return extract(replace(tiny_reference_models.STEPS[name](), training=training))


def made(name: str) -> Workload:
    torch.manual_seed(0)
    step = (STEPS | FURTHER)[name]()
    if name in DOUBLE:
        images, labels = step.inputs
        images = torch.randn(3 * len(images), *images.shape[1:], dtype=torch.float64)
        step = Workload.of(step.model.double(), (images, labels.repeat(3)), step.loss)
    return step


def fresh(name: str) -> Extraction:
    """Return an extraction with its own copy of the model, for tests that change it."""
    return copied(extracted(name))


def copied(extraction: Extraction) -> Extraction:
    memo: dict[int, Any] = {id(extraction.forward): extraction.forward}
    step = copy.deepcopy(extraction.step, memo)
    return replace(extraction, step=step)


def on(
    extraction: Extraction, device: torch.device, chosen: Callable[[str], bool]
) -> dict[str, torch.device | str]:
    """Return a placement with the chosen calls on the device and the others on the CPU."""
    calls = extraction.forward.placed_calls
    return {call.key: device if chosen(call.key) else "cpu" for call in calls}


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
