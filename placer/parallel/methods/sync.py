"""The interface of the sync methods, and its implementation with an optimizer on every rank."""

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
from placer.parallel.methods.block_averager import PERIOD, BlockAverager, mean_of_ranks
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


class OptimizerSync:
    """Updates with an optimizer on every rank.

    Either gradients are reduced before every update, or models are averaged after some.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: GradSync | None = None,
        averager: BlockAverager | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._averager = averager

    def zero_grad(self) -> None:
        """Begin a step."""
        (self._gradients or self._optimizer).zero_grad()

    def step(self) -> None:
        """Update this replica."""
        if self._gradients is not None:
            self._gradients.finish()
        self._optimizer.step()
        if self._averager is not None:
            self._averager.after_step()

    def finish(self) -> None:
        """End the current block, if any, and take the common model."""
        if self._averager is not None:
            self._averager.finish()

    def _stateful(self) -> dict[str, Any]:
        parts = {
            "optimizer": self._optimizer,
            "reductions": self._gradients,
            "averager": self._averager,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer and of the reductions or the averager."""
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])

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
    """
    config = config or SyncConfig()
    method = method_named(config.method)
    module_name, _, name = method.home.rpartition(":")
    module_name = module_name or "block_averager"
    home: Any = getattr(import_module(f"placer.parallel.methods.{module_name}"), name)
    if method.family == "server":
        server: Sync = home(module, make_optimizer, group_of)
        return server
    if method.family == "reduction":
        gradients = GradSync(
            module,
            reduction=partial(home, **config.options),
            group_of=group_of,
            accumulate=config.accumulate,
            bucket_bytes=config.bucket_bytes,
        )
        return OptimizerSync(make_optimizer(module.parameters()), gradients=gradients)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("no parameter needs a gradient: there is nothing to average")
    broadcast_state(module, group_of)
    optimizer = make_optimizer(module.parameters())
    changed = {"momentum": config.block_momentum, "rate": config.block_rate}
    averager = BlockAverager(
        module,
        replace(home, **{name: value for name, value in changed.items() if value is not None}),
        period=config.period or PERIOD,
        warmup_steps=config.warmup_steps or 0,
        inner=optimizer,
        workers=dist.get_world_size(group_of(next(module.parameters()).device)),
        mean=lambda flat: mean_of_ranks(flat, group_of(flat.device)),
    )
    return OptimizerSync(optimizer, averager=averager)
