"""Average replicas block by block; model averaging, BMUF, SlowMo and DiLoCo are its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from placer.parallel.grad_sync import Group

Mean: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Averages a flat tensor over all workers."""
PERIOD: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdate:
    """Update of the common model by the mean W̄(t) of the workers after block t.

    Chen and Huo, "Scalable training of deep learning machines by incremental block training with
    intra-block parallel optimization and blockwise model-update filtering", ICASSP 2016::

        G(t) = W̄(t) - W_g(t-1)      Δ(t) = momentum Δ(t-1) + rate G(t)      W(t) = W(t-1) + Δ(t)

    The next block starts from W_g(t) = W(t), or with ``nesterov`` from W(t) + momentum Δ(t); the
    result of training is W(T). Momentum 0 and rate 1 is model averaging. Without Nesterov this is
    SlowMo at a constant learning rate (Wang et al., ICLR 2020); with it, momentum 0.9 and rate 0.7
    is DiLoCo (Douillard et al., 2023).

    ``momentum`` None means 1 - 1 / workers, which compensates for the mean: it divides every
    worker's progress by their number. ``reset_inner`` clears the momentum of each worker's own
    optimizer, which belongs to its parameters before the update.
    """

    momentum: float | None = None
    rate: float = 1.0
    nesterov: bool = True
    reset_inner: bool = True

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"block momentum {self.momentum} is not within 0 .. 1")
        if not self.rate > 0:
            raise ValueError(f"block rate {self.rate} is not above 0")


AVERAGING: Final = BlockUpdate(momentum=0.0, reset_inner=False)
BMUF: Final = BlockUpdate()
BMUF_CLASSIC: Final = BlockUpdate(nesterov=False)
SLOWMO: Final = BlockUpdate(momentum=0.5, nesterov=False)
DILOCO: Final = BlockUpdate(momentum=0.9, rate=0.7, reset_inner=False)


class BlockAverager:
    """Let workers train independently for a block of steps, then give them a common model.

    Call :meth:`after_step` after each step of the worker's own optimizer, and :meth:`finish` at the
    end. Parameters stay the same objects in the same memory; those that need no gradient are left
    unchanged. Real and complex buffers, such as running statistics, are averaged at the end of each
    block, also those that the model replaces.
    """

    def __init__(
        self,
        module: nn.Module,
        update: BlockUpdate = BMUF,
        *,
        period: int = PERIOD,
        warmup_steps: int = 0,
        inner: torch.optim.Optimizer | None = None,
        workers: int | None = None,
        mean: Mean | None = None,
    ) -> None:
        """Store the initial model, which must be the same on all workers.

        Args:
            module: the worker's replica.
            update: how the mean updates the common model.
            period: steps per block.
            warmup_steps: steps before the first block; models are averaged after each of them.
            inner: the worker's own optimizer, whose momentum may be reset.
            workers: number of workers; by default all ranks.
            mean: averages over the workers, by default over all ranks.
        """
        if period < 1:
            raise ValueError(f"a block has {period} steps, below 1")
        self.update = update
        self.period = period
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._ended_at: int | None = None
        self.inner = inner
        self._module = module
        self._mean = mean or mean_of_ranks
        self._parameters = _by_device_and_dtype(p for p in module.parameters() if p.requires_grad)
        self._base = [nn.Parameter(flat_of(group)) for group in self._parameters]  # W_g
        momentum = update.momentum
        if momentum is None:
            momentum = 1 - 1 / (workers or dist.get_world_size())
        self._is_plain = momentum == 0 and update.rate == 1
        self._outer = torch.optim.SGD(
            self._base,
            lr=update.rate,
            momentum=momentum,
            nesterov=update.nesterov and momentum > 0,
        )

    @property
    def at_border(self) -> bool:
        """Return whether the last step ended a block, so that all workers have the same model."""
        return (self.steps - self.warmup_steps) % self.period == 0 or self.is_warming_up

    @property
    def is_warming_up(self) -> bool:
        """Return whether the last step was before the first block."""
        return self.steps <= self.warmup_steps

    def after_step(self) -> None:
        """Count a step, and end the block if it was its last."""
        self.steps += 1
        if self.at_border:
            self._end_block()

    @torch.no_grad()
    def finish(self) -> None:
        """End the current block, if any, and set the parameters to W(T), the model to use."""
        if not self.at_border and self._ended_at != self.steps:
            self._end_block()
        [settings] = self._outer.param_groups
        for group, base in zip(self._parameters, self._base, strict=True):
            velocity = self._velocity(base)
            if settings["nesterov"] and velocity is not None:
                # W = W_g - momentum Δ, and Δ = -rate v of torch's SGD
                write(group, base + settings["lr"] * settings["momentum"] * velocity)
            else:
                write(group, base)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, the common model and the block momentum."""
        velocity = [self._velocity(base) for base in self._base]
        return {
            "steps": self.steps,
            "base": [base.detach().clone() for base in self._base],
            "velocity": [None if v is None else v.clone() for v in velocity],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.steps, self._ended_at = state["steps"], None
        for base, kept, velocity in zip(self._base, state["base"], state["velocity"], strict=True):
            base.copy_(kept)
            self._outer.state[base].clear()
            if velocity is not None:
                self._outer.state[base]["momentum_buffer"] = velocity.clone().to(base.device)

    def _velocity(self, base: nn.Parameter) -> torch.Tensor | None:
        velocity: torch.Tensor | None = self._outer.state.get(base, {}).get("momentum_buffer")
        return velocity

    @torch.no_grad()
    def _end_block(self) -> None:
        self._ended_at = self.steps
        is_plain = self._is_plain or self.is_warming_up
        for group, base in zip(self._parameters, self._base, strict=True):
            mean = self._mean(flat_of(group))
            if is_plain:
                base.copy_(mean)
            else:
                base.grad = base - mean
        if not is_plain:
            self._outer.step()
        for group, base in zip(self._parameters, self._base, strict=True):
            write(group, base)
        buffers = (b for b in self._module.buffers() if b.is_floating_point() or b.is_complex())
        for group in _by_device_and_dtype(buffers):
            write(group, self._mean(flat_of(group)))
        if self.update.reset_inner and self.inner is not None and not self.is_warming_up:
            for state in self.inner.state.values():
                for name in ("momentum_buffer", "exp_avg"):
                    if state.get(name) is not None:
                        state[name].zero_()


def mean_of_ranks(flat: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Average a tensor in place over the ranks of a group (None: all ranks)."""
    dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
    return flat


def flat_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors into a flat copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def write(tensors: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy a flat tensor as from :func:`flat_of` into tensors, in place."""
    at = 0
    for tensor in tensors:
        tensor.detach().copy_(flat.detach()[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


def _by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
