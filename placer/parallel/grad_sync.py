"""Average gradients over replicas during the backward pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from envs.replication import BUCKET_BYTES
from placer.parallel.buckets import Bucket, filled_buckets
from placer.parallel.methods.reductions import AllReduce, Reduction
from placer.parallel.processes import check_same

Group: TypeAlias = dist.ProcessGroup | None


class GradSync:
    """Replaces the gradients of a replica by their mean over all replicas.

    A replica may use several devices, also of several types, which DDP rejects; every rank has the
    same placement. Call :meth:`finish` before the optimizer's step::

        sync = GradSync(replica)
        for batch in shard:
            sync.zero_grad()
            replica(*batch).backward()
            sync.finish()
            optimizer.step()

    Gradients are views of flat buckets; a bucket is reduced as soon as all its gradients have
    arrived and all earlier buckets have started. Gradients dropped or replaced in between, as by
    ``optimizer.zero_grad()``, are copied into their views. An unused parameter has the gradient 0,
    not None: ranks may use different parameters. Which parameters need gradients is fixed at
    construction.

    Parameters and buffers start as those of the first rank of the group. Buffers are not
    synchronized afterwards: each replica has its own running statistics.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        reduction: Callable[[Group], Reduction] = AllReduce,
        group_of: Callable[[torch.device], Group] = lambda device: None,
        accumulate: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Lay the gradients out in buckets and register the gradient hooks.

        Args:
            module: the replica, already on its devices.
            reduction: makes the reduction of a process group.
            group_of: returns the process group of a device: the same device of all replicas. None
                is all ranks.
            accumulate: backward passes per step, whose gradients are added up.
            bucket_bytes: maximum bytes per bucket, except for larger single parameters.
        """
        self.accumulate = accumulate
        self.buckets = filled_buckets(dict(module.named_parameters()), bucket_bytes, accumulate)
        if not self.buckets:
            raise ValueError("no parameter needs a gradient: there is nothing to reduce")
        self._queues: dict[Group, list[Bucket]] = {}
        for bucket in self.buckets:
            self._queues.setdefault(group_of(bucket.flat.device), []).append(bucket)
        for group, queue in self._queues.items():
            check_same("the parameters to reduce", _form(queue), group)
            for index, bucket in enumerate(queue):
                bucket.place = (index, bucket is queue[-1])
        broadcast_state(module, group_of)
        self.reductions = {group: reduction(group) for group in self._queues}
        self._lock = threading.Lock()  # autograd has one thread per accelerator
        named = dict(module.named_parameters())
        self._handles = [
            named[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # untyped in torch
                functools.partial(self._arrived, group, bucket, number)
            )
            for group, queue in self._queues.items()
            for bucket in queue
            for number, name in enumerate(bucket.names)
        ]
        self.zero_grad()

    def zero_grad(self) -> None:
        """Begin a step; cheaper than the optimizer's own, after which views must be restored."""
        for bucket in self.buckets:
            bucket.adopt_all()
            bucket.flat.zero_()

    def finish(self) -> None:
        """Reduce the remaining buckets and wait for all; gradients are means afterwards."""
        with self._lock:
            for group, queue in self._queues.items():
                for bucket in queue:
                    if bucket.pending is None:
                        bucket.adopt_all()
                        self._start(group, bucket)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            bucket.begin()

    def close(self) -> None:
        """Remove the gradient hooks; gradients stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the reductions, in the order of their groups."""
        return {str(i): each.state_dict() for i, each in enumerate(self.reductions.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        for i, reduction in enumerate(self.reductions.values()):
            reduction.load_state_dict(state[str(i)])

    def _arrived(self, group: Group, bucket: Bucket, number: int, _: torch.Tensor) -> None:
        with self._lock:
            bucket.arrive(number)
            for waiting in self._queues[group]:  # in the same order on all ranks
                if waiting.pending is None:
                    if not waiting.is_full:
                        return
                    self._start(group, waiting)

    def _start(self, group: Group, bucket: Bucket) -> None:
        bucket.await_gradients()
        bucket.pending = self.reductions[group].start(bucket)


@torch.no_grad()
def broadcast_state(
    module: nn.Module, group_of: Callable[[torch.device], Group] = lambda device: None
) -> None:
    """Copy parameters and buffers from the first rank of each group to all others.

    Backends take contiguous tensors, or send their memory in whatever order it is. Bytes are sent,
    since gloo does not know every dtype.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        group = group_of(tensor.device)
        first = 0 if group is None else dist.get_global_rank(group, 0)
        sent = tensor.detach().contiguous()
        dist.broadcast(sent.reshape(-1).view(torch.uint8), first, group=group)
        if not tensor.is_contiguous():
            tensor.copy_(sent)


def _form(queue: list[Bucket]) -> str:
    return "; ".join(
        f"{p.device.type} {name} {tuple(p.shape)} {p.stride()} {p.dtype}"
        for bucket in queue
        for name, p in zip(bucket.names, bucket.parameters(), strict=True)
    )
