"""Reductions of buckets: sums in full or half precision, and those that come as hooks of DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from placer.parallel.bucket import GradientBucket, Pending


class Reduction(Protocol):
    """Averages the buckets of one process group over its ranks."""

    def start(self, bucket: GradientBucket) -> Pending:
        """Begin; every rank starts the same buckets in the same order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it remembers from step to step, residuals for one: of tensors, numbers, texts."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        ...


class Stateless:
    """What reductions have in common that remember nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


class OfGroup(Stateless):
    """A reduction that knows its ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)


class AllReduce(OfGroup):
    """The mean by the all-reduce of the backend."""

    def start(self, bucket: GradientBucket) -> Pending:
        """Send the gradients as they are."""
        flat = bucket.buffer().div_(self.ranks)
        return begun(dist.all_reduce(flat, group=self.group, async_op=True))


class HalfPrecision(OfGroup):
    """The mean of gradients that are sent, and added, in a narrower dtype."""

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.dtype = dtype

    def start(self, bucket: GradientBucket) -> Pending:
        """Send them rounded; they are divided first, since sums may exceed the range of fp16."""
        flat = bucket.buffer()
        narrow = flat.div_(self.ranks).to(self.dtype)
        work = begun(dist.all_reduce(narrow, group=self.group, async_op=True))
        return Then(work, lambda: flat.copy_(narrow))


class HookReduction(Stateless):
    """A communication hook of DDP: ``hook(state, bucket)`` gives a future of the mean.

    The other way round, a reduction as a hook, is :func:`placer.parallel.ddp.ddp_hook`.
    """

    def __init__(
        self, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]], state: Any
    ) -> None:
        """Wrap a hook, with what it is given; that knows the process group."""
        self.hook = hook
        self.state = state

    def start(self, bucket: GradientBucket) -> Pending:
        """Call the hook."""
        flat, future = bucket.buffer(), self.hook(self.state, bucket)

        def take() -> None:
            mean = future.value()
            if mean.data_ptr() != flat.data_ptr():
                flat.copy_(mean)

        return Then(future, take)


class Then:
    """What is left to do when a reduction has come through."""

    def __init__(self, before: Pending, finish: Callable[[], object]) -> None:
        self._before = before
        self._finish = finish

    def wait(self) -> None:
        """Wait for it, then do the rest."""
        self._before.wait()
        self._finish()


def begun(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous collective."""
    assert work is not None, "asynchronous collectives return their work to members of the group"
    return work


def all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The flat tensors of all ranks of a group, one after the other; torch 2.13 renamed it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    every = mine.new_empty(mine.numel() * dist.get_world_size(group))
    gather(every, mine, group=group)
    return every


def reduce_scatter(
    part: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Begin to sum flat tensors so that each rank of a group gets its part."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return begun(scatter(part, flat, group=group, async_op=True))
