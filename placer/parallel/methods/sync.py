"""The interface of the sync methods, and its two families: reductions and averages of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from placer.parallel.grad_sync import GradSync, Group, broadcast_state
from placer.parallel.methods.block_averager import (
    PERIOD,
    BlockAverager,
    BlockUpdate,
    mean_of_ranks,
)
from placer.parallel.methods.reductions import Reduction
from placer.parallel.methods.registry import SyncConfig, method_named

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
GroupOf: TypeAlias = Callable[[torch.device], Group]


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


class EveryStep:
    """Reduces gradients in every step."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        config: SyncConfig,
        group_of: GroupOf,
        *,
        reduction: Callable[..., Reduction],
    ) -> None:
        """Lay out gradients; ``reduction`` takes a process group and the options that are set."""
        self._gradients = GradSync(
            module,
            reduction=partial(reduction, **config.options),
            group_of=group_of,
            accumulate=config.accumulate,
            bucket_bytes=config.bucket_bytes,
        )
        self._optimizer = make_optimizer(module.parameters())

    def zero_grad(self) -> None:
        """Begin a step."""
        self._gradients.zero_grad()

    def step(self) -> None:
        """Finish the reductions, then update."""
        self._gradients.finish()
        self._optimizer.step()

    def finish(self) -> None:
        """Do nothing: the replicas are equal after every step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the reductions."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "reductions": self._gradients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._gradients.load_state_dict(state["reductions"])

    def report(self) -> dict[str, Any]:
        """Return an empty report."""
        return {}


class EveryBlock:
    """Trains replicas independently and averages them after every block."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        config: SyncConfig,
        group_of: GroupOf,
        *,
        update: BlockUpdate,
    ) -> None:
        """Start all replicas from the model of the first rank."""
        broadcast_state(module, group_of)
        self._optimizer = make_optimizer(module.parameters())
        if config.block_momentum is not None:
            update = replace(update, momentum=config.block_momentum)
        if config.block_rate is not None:
            update = replace(update, rate=config.block_rate)
        first = next(module.parameters())
        self._averager = BlockAverager(
            module,
            update,
            period=config.period or PERIOD,
            warmup_steps=config.warmup_steps or 0,
            inner=self._optimizer,
            workers=dist.get_world_size(group_of(first.device)),
            mean=lambda flat: mean_of_ranks(flat, group_of(flat.device)),
        )

    def zero_grad(self) -> None:
        """Begin a step."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Update this replica; average all replicas at the end of a block."""
        self._optimizer.step()
        self._averager.after_step()

    def finish(self) -> None:
        """End the current block, if any, and take the common model."""
        self._averager.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the replica's optimizer and of the averager."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "averager": self._averager.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._averager.load_state_dict(state["averager"])

    def report(self) -> dict[str, Any]:
        """Return an empty report."""
        return {}


def make_sync(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    config: SyncConfig | None = None,
    *,
    group_of: GroupOf = lambda device: None,
) -> Sync:
    """Create what keeps a replica in sync with those of all other ranks.

    Args:
        module: the replica, on its devices.
        make_optimizer: makes the optimizer for some parameters.
        config: method and options; by default the mean of gradients in every step.
        group_of: returns the process group of a device, None for all ranks.

    Raises:
        ValueError: the replicas do not match, or the method cannot work on them.
    """
    config = config or SyncConfig()
    method = method_named(config.method)
    module_name, _, name = method.home.partition(":")
    home: Any = getattr(import_module(f"placer.parallel.methods.{module_name}"), name)
    match method.family:
        case "reduction":
            return EveryStep(module, make_optimizer, config, group_of, reduction=home)
        case "average":
            return EveryBlock(module, make_optimizer, config, group_of, update=home)
    sync: Sync = home(module, make_optimizer, group_of)
    return sync
