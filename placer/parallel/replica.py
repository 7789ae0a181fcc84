"""A replica: the placed model of one rank, on that rank's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from envs.executors.cores.placed_model import PlacedModel
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.placement import Placement
from graphs.extract import AUTO, Workload, extract
from placer.applying import apply_extracted
from placer.parallel.data import Batch


class Replica(Protocol):
    """A placed model whose gradients can be reduced."""

    module: nn.Module

    def backward(self, passes: Sequence[Batch]) -> float:
        """Add the mean gradients of some batches to the existing ones; return the mean loss."""
        ...

    def random_state(self) -> list[torch.Tensor]:
        """Return the states of random generators outside this process."""
        ...

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Restore what :meth:`random_state` returned on this rank."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...


class InProcess:
    """A replica on torch devices; gradients are reduced during the backward pass."""

    def __init__(self, placed: PlacedModule | HookedModule) -> None:
        self.module: nn.Module = placed

    def backward(self, passes: Sequence[Batch]) -> float:
        """Run one pass per batch."""
        total = 0.0
        for inputs, keywords in passes:
            loss: torch.Tensor = self.module(*inputs, **keywords) / len(passes)
            torch.autograd.backward(loss)
            total += loss.item()
        return total

    def random_state(self) -> list[torch.Tensor]:
        """Return an empty list: this process draws all random numbers."""
        return []

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


class OnPinnedCores:
    """A replica on pinned cores; its workers deliver all gradients after the backward pass."""

    def __init__(self, placed: PlacedModel) -> None:
        self.module = placed.model
        self._placed = placed

    def backward(self, passes: Sequence[Batch]) -> float:
        """Run one pass per batch; gradients must be zero or None before."""
        total = 0.0
        for inputs, keywords in passes:
            loss: torch.Tensor = self._placed.step(*inputs, **keywords)
            total += loss.item()
        if len(passes) > 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(len(passes))
        return total / len(passes)

    def random_state(self) -> list[torch.Tensor]:
        """Return the states of the workers' generators."""
        return self._placed.random_state()

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Restore what :meth:`random_state` returned."""
        self._placed.load_random_state(states)

    def close(self) -> None:
        """End the workers."""
        self._placed.close()


def placed_replica(step: Workload, placement: Placement, extractor: str = AUTO) -> Replica:
    """Return the model of a training step, placed and ready for batches.

    Raises:
        ExtractionError: the model cannot be extracted.
        ValueError: the placement is of another graph, or its devices do not exist here.
        WorkerError: workers of pinned cores do not start.
    """
    placed = apply_extracted(extract(step, extractor), placement)
    return OnPinnedCores(placed) if isinstance(placed, PlacedModel) else InProcess(placed)
