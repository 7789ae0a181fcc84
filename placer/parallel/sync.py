"""What a way of keeping replicas one model is, and what it is made from."""

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
        """Use the gradients that are there.

        Raises:
            RuntimeError: another rank is gone.
        """
        ...

    def finish(self) -> None:
        """Give the replica the parameters that are the result, on every rank the same."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What training goes on from on this rank, parameters and buffers aside.

        Raises:
            ValueError: no state would: results depend on timing.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on this rank."""
        ...

    def report(self) -> dict[str, Any]:
        """What there is to tell about the run, for people and machines."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a :class:`Sync` is made from.

    Attributes:
        module: the replica, on its devices.
        make_optimizer: makes the optimizer for some parameters.
        options: settings of the methods.
        accumulate: backward passes of a step, whose gradients are added up.
        group_of: the process group of a device, None being that of all ranks.
        bucket_bytes: most bytes of gradients that are reduced together.
    """

    module: nn.Module
    make_optimizer: MakeOptimizer
    options: SyncOptions = field(default_factory=SyncOptions)
    accumulate: int = 1
    group_of: Callable[[torch.device], Group] = lambda device: None
    bucket_bytes: int = BUCKET_BYTES
