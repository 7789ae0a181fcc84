"""Sync methods by name: gradient reductions every step, model averages every block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from placer.parallel import block_averager as blocks
from placer.parallel.block_averager import BlockAverager, BlockUpdate, mean_of_ranks
from placer.parallel.grad_sync import GradSync, Group, broadcast_state
from placer.parallel.hierarchical import Hierarchical
from placer.parallel.onebit import OneBit
from placer.parallel.options import WARMUP_STEPS
from placer.parallel.powersgd import RANK, PowerSgd
from placer.parallel.reductions import AllReduce, HalfPrecision, Reduction
from placer.parallel.sync import Setup, Sync


class EveryStep:
    """Reduces gradients in every step."""

    def __init__(self, setup: Setup, reduction: Callable[[Group], Reduction]) -> None:
        self._gradients = GradSync(
            setup.module,
            reduction=reduction,
            group_of=setup.group_of,
            accumulate=setup.accumulate,
            bucket_bytes=setup.bucket_bytes,
        )
        self._optimizer = setup.make_optimizer(setup.module.parameters())

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

    def __init__(self, setup: Setup, update: BlockUpdate) -> None:
        broadcast_state(setup.module, setup.group_of)
        self._optimizer = setup.make_optimizer(setup.module.parameters())
        options, group_of = setup.options, setup.group_of
        first = next(setup.module.parameters())
        self._averager = BlockAverager(
            setup.module,
            _adjusted(update, options.block_momentum, options.block_rate),
            period=options.period or blocks.PERIOD,
            warmup_steps=options.warmup_steps or 0,
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


def allreduce(setup: Setup) -> Sync:
    """Return the mean of gradients in full precision."""
    return EveryStep(setup, AllReduce)


def hierarchical(setup: Setup) -> Sync:
    """Return the mean of gradients, reduced level by level."""
    return EveryStep(setup, partial(Hierarchical, levels=setup.options.levels))


def fp16(setup: Setup) -> Sync:
    """Return the mean of gradients in fp16."""
    return EveryStep(setup, partial(HalfPrecision, torch.float16))


def bf16(setup: Setup) -> Sync:
    """Return the mean of gradients in bf16."""
    return EveryStep(setup, partial(HalfPrecision, torch.bfloat16))


def powersgd(setup: Setup) -> Sync:
    """Return PowerSGD."""
    rank = setup.options.approximation_rank or RANK
    return EveryStep(setup, partial(PowerSgd, rank=rank, warmup_steps=_warmup(setup)))


def onebit(setup: Setup) -> Sync:
    """Return 1-bit SGD."""
    return EveryStep(setup, partial(OneBit, warmup_steps=_warmup(setup)))


def averaging(setup: Setup) -> Sync:
    """Return model averaging."""
    return EveryBlock(setup, blocks.AVERAGING)


def bmuf(setup: Setup) -> Sync:
    """Return BMUF with Nesterov block momentum."""
    return EveryBlock(setup, blocks.BMUF)


def bmuf_classic(setup: Setup) -> Sync:
    """Return BMUF with classical block momentum."""
    return EveryBlock(setup, blocks.BMUF_CLASSIC)


def slowmo(setup: Setup) -> Sync:
    """Return SlowMo."""
    return EveryBlock(setup, blocks.SLOWMO)


def diloco(setup: Setup) -> Sync:
    """Return DiLoCo."""
    return EveryBlock(setup, blocks.DILOCO)


def _warmup(setup: Setup) -> int:
    given = setup.options.warmup_steps
    return WARMUP_STEPS if given is None else given


def _adjusted(update: BlockUpdate, momentum: float | None, rate: float | None) -> BlockUpdate:
    if momentum is not None:
        update = replace(update, momentum=momentum)
    return update if rate is None else replace(update, rate=rate)
