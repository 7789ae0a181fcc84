"""Interface of the sync methods, and what they are created from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from placer.parallel.grad_sync import BUCKET_BYTES, Group
from placer.parallel.options import SyncOptions

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Sync(Protocol):
    """Trains a replica together with those of all other ranks; drives its optimizer.

    ::

        for batch in shard:
            sync.zero_grad()
            replica(*batch).backward()
            sync.step()
        sync.finish()
    """

    def zero_grad(self) -> None:
        """Begin a step."""
        ...

    def step(self) -> None:
        """Update the model with the current gradients.

        Raises:
            RuntimeError: another rank is gone.
        """
        ...

    def finish(self) -> None:
        """Set the replica to the resulting parameters, the same on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from on this rank, without parameters and buffers.

        Raises:
            ValueError: the method cannot resume, since its results depend on timing.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        ...

    def report(self) -> dict[str, Any]:
        """Return statistics of the run, for people and programs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a :class:`Sync` is created from.

    Attributes:
        module: the replica, on its devices.
        make_optimizer: makes the optimizer for some parameters.
        options: options of the sync methods.
        accumulate: backward passes per step, whose gradients are added up.
        group_of: returns the process group of a device, None for all ranks.
        bucket_bytes: maximum bytes of gradients that are reduced together.
    """

    module: nn.Module
    make_optimizer: MakeOptimizer
    options: SyncOptions = field(default_factory=SyncOptions)
    accumulate: int = 1
    group_of: Callable[[torch.device], Group] = lambda device: None
    bucket_bytes: int = BUCKET_BYTES
