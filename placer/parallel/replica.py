"""A replica: the placed model of one rank, on the devices of that rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from envs.discover import core_set, cores_of, is_here
from envs.executor.hooked_module import HookedModule
from envs.executor.placed import PlacedModel
from envs.executor.placed_module import PlacedModule
from envs.placement import Placement
from envs.torch_devices import is_core
from graphs.extract import Step, extract
from graphs.extract.extraction import AUTO
from placer.api import apply_extracted
from placer.parallel.data import Batch


class Replica(Protocol):
    """A placed model whose gradients can be reduced."""

    module: nn.Module

    def backward(self, batch: Batch) -> float:
        """Add the gradients of a batch to those that are there; gives the loss."""
        ...

    def close(self) -> None:
        """Let go of the devices."""
        ...


class InProcess:
    """On torch's own devices; gradients are reduced while the backward pass runs."""

    def __init__(self, placed: PlacedModule | HookedModule) -> None:
        self.module: nn.Module = placed

    def backward(self, batch: Batch) -> float:
        """Run a step."""
        inputs, keywords = batch
        loss: torch.Tensor = self.module(*inputs, **keywords)
        torch.autograd.backward(loss)
        return loss.item()

    def close(self) -> None:
        """Nothing is held."""


class OnPinnedCores:
    """On pinned cores; their workers give all gradients at the end, which are reduced then."""

    def __init__(self, placed: PlacedModel) -> None:
        self.module = placed.model
        self._placed = placed

    def backward(self, batch: Batch) -> float:
        """Run a step."""
        inputs, keywords = batch
        loss: torch.Tensor = self._placed.step(*inputs, **keywords)
        return loss.item()

    def close(self) -> None:
        """End the workers."""
        self._placed.close()


def placed_replica(step: Step, placement: Placement, extractor: str = AUTO) -> Replica:
    """The model of a training step as a placement says, ready for batches.

    Raises:
        ExtractionError: the model cannot be extracted.
        ValueError: the placement is of another graph, or its devices are not here.
        WorkerError: workers of pinned cores do not come up.
    """
    placed = apply_extracted(extract(step, extractor), placement)
    return OnPinnedCores(placed) if isinstance(placed, PlacedModel) else InProcess(placed)


def on_own_devices(placement: Placement, local_rank: int, replicas: int) -> tuple[Placement, bool]:
    """A placement on the devices of one of the replicas of this host.

    The first replica takes the devices of the placement, the next as many of each backend that
    follow, if all of them are here; the CPU is shared.

    Returns:
        The placement, and whether replicas share devices for lack of others.
    """
    renamed = [_renamed(placement.device_names, k) for k in range(replicas)]
    if not all(is_here(name) for names in renamed for name in names):
        return placement, replicas > 1
    return replace(placement, device_names=renamed[local_rank]), False


def _renamed(names: tuple[str, ...], replica: int) -> tuple[str, ...]:
    """Devices of replica k: numbers moved on by k times as many as a replica uses."""
    cores = [core for name in names if is_core(name) for core in cores_of(name)]
    span = max(cores) - min(cores) + 1 if cores else 0
    indices = [int(name.rpartition(":")[2]) for name in names if _is_numbered(name)]
    width = max(indices) - min(indices) + 1 if indices else 0
    found = []
    for name in names:
        if is_core(name):
            found.append(core_set(core + replica * span for core in cores_of(name)))
        elif _is_numbered(name):
            backend, _, index = name.rpartition(":")
            found.append(f"{backend}:{int(index) + replica * width}")
        else:
            found.append(name)
    return tuple(found)


def _is_numbered(name: str) -> bool:
    return not is_core(name) and ":" in name
