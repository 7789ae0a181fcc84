"""A replica: the placed model of one rank, on the devices of that rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from envs.executor.hooked_module import HookedModule
from envs.executor.placed import PlacedModel
from envs.executor.placed_module import PlacedModule
from envs.placement import Placement
from graphs.extract import AUTO, Step, extract
from placer.applying import apply_extracted
from placer.parallel.data import Batch


class Replica(Protocol):
    """A placed model whose gradients can be reduced."""

    module: nn.Module

    def backward(self, passes: Sequence[Batch]) -> float:
        """Add the mean gradients of some batches to those that are there; gives the mean loss."""
        ...

    def random_state(self) -> list[torch.Tensor]:
        """Of the generators that are not those of this process."""
        ...

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Go on from what :meth:`random_state` gave on this rank."""
        ...

    def close(self) -> None:
        """Let go of the devices."""
        ...


class InProcess:
    """On torch's own devices; gradients are reduced while the backward pass runs."""

    def __init__(self, placed: PlacedModule | HookedModule) -> None:
        self.module: nn.Module = placed

    def backward(self, passes: Sequence[Batch]) -> float:
        """Run a pass for each batch."""
        total = 0.0
        for inputs, keywords in passes:
            loss: torch.Tensor = self.module(*inputs, **keywords) / len(passes)
            torch.autograd.backward(loss)
            total += loss.item()
        return total

    def random_state(self) -> list[torch.Tensor]:
        """None: this process draws all random numbers."""
        return []

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing is held."""


class OnPinnedCores:
    """On pinned cores; their workers give all gradients at the end, which are reduced then."""

    def __init__(self, placed: PlacedModel) -> None:
        self.module = placed.model
        self._placed = placed

    def backward(self, passes: Sequence[Batch]) -> float:
        """Run a pass for each batch; gradients must be zero or None before."""
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
        """Of the workers."""
        return self._placed.random_state()

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Go on from what :meth:`random_state` gave."""
        self._placed.load_random_state(states)

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
