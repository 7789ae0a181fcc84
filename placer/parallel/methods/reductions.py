"""Reductions of buckets: sums in full or half precision, and DDP communication hooks.

Annotations are not strings here, since DDP compares those of its hooks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from placer.parallel.buckets import GradientBucket, Pending


class Reduction(Protocol):
    """Averages the buckets of one process group over its ranks."""

    def start(self, bucket: GradientBucket) -> Pending:
        """Start reducing a bucket; every rank starts the same buckets in the same order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state kept between steps, such as residuals: tensors, numbers and strings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        ...


class Stateless:
    """Base class of reductions without state."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


class OfGroup(Stateless):
    """A stateless reduction over a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)


class AllReduce(OfGroup):
    """Averages with the all-reduce of the backend."""

    def start(self, bucket: GradientBucket) -> Pending:
        """Start the all-reduce of the gradients."""
        flat = bucket.buffer().div_(self.ranks)
        return begun(dist.all_reduce(flat, group=self.group, async_op=True))


class Float16(OfGroup):
    """Averages gradients that are sent, and added, in half precision."""

    dtype = torch.float16

    def start(self, bucket: GradientBucket) -> Pending:
        """Start the all-reduce in the narrow dtype; divide first, since sums may overflow fp16."""
        flat = bucket.buffer()
        narrow = flat.div_(self.ranks).to(self.dtype)
        work = begun(dist.all_reduce(narrow, group=self.group, async_op=True))
        return Then(work, lambda: flat.copy_(narrow))


class BFloat16(Float16):
    """The same in bfloat16."""

    dtype = torch.bfloat16


class HookReduction(Stateless):
    """A DDP communication hook, ``hook(state, bucket)``, as a reduction; see :func:`ddp_hook`."""

    def __init__(
        self, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]], state: Any
    ) -> None:
        """Wrap a hook and its state, which holds the process group."""
        self.hook = hook
        self.state = state

    def start(self, bucket: GradientBucket) -> Pending:
        """Call the hook; ``wait`` copies the mean of its future into the bucket."""
        flat, future = bucket.buffer(), self.hook(self.state, bucket)

        def take() -> None:
            mean = future.value()
            if mean.data_ptr() != flat.data_ptr():
                flat.copy_(mean)

        return Then(future, take)


def ddp_hook(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch hides it from type checkers
) -> torch.futures.Future[torch.Tensor]:
    """Run a reduction as a DDP hook: ``ddp.register_comm_hook(reduction, ddp_hook)``.

    It waits for each bucket, so nothing overlaps with the backward pass. DDP rebuilds its buckets
    after the first step, so stateful reductions must start with a later one.
    """
    state.start(bucket).wait()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Then:
    """A pending reduction followed by a callback."""

    def __init__(self, before: Pending, finish: Callable[[], object]) -> None:
        self._before = before
        self._finish = finish

    def wait(self) -> None:
        """Wait for the reduction, then call the callback."""
        self._before.wait()
        self._finish()


def begun(work: dist.Work | None) -> dist.Work:
    """Return the work of an asynchronous collective, which must not be None."""
    assert work is not None, "asynchronous collectives return their work to members of the group"
    return work


def all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the concatenated flat tensors of all ranks; torch 2.13 renamed the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    every = mine.new_empty(mine.numel() * dist.get_world_size(group))
    gather(every, mine, group=group)
    return every


def reduce_scatter(
    part: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Start summing flat tensors such that each rank of a group receives its part."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return begun(scatter(part, flat, group=group, async_op=True))
