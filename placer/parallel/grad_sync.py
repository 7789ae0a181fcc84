"""Averages gradients over replicas while the backward pass still runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from placer.parallel.bucket import Bucket, filled_buckets
from placer.parallel.groups import check_same
from placer.parallel.reductions import AllReduce, Reduction

BUCKET_BYTES: Final = 25 << 20
"""What DDP takes, too."""
Group: TypeAlias = dist.ProcessGroup | None


class GradSync:
    """Gradients of a replica become their mean over all replicas.

    A replica may lie on several devices, also of several types, which DDP refuses; every rank has
    the same placement. Call :meth:`finish` before the optimizer's step::

        sync = GradSync(replica)
        for batch in shard:
            sync.zero_grad()
            replica(*batch).backward()
            sync.finish()
            optimizer.step()

    Gradients are views of flat buckets; a bucket is reduced as soon as all of it has arrived and
    those before it have started. Gradients that were dropped or replaced in between, as by
    ``optimizer.zero_grad()``, are copied into their views. A parameter that took no part has the
    gradient 0, not None: ranks may use different parameters. Which parameters need gradients is
    settled when it is made.

    Parameters and buffers are those of the first rank of the group to begin with. Buffers are not
    touched afterwards: running statistics are each replica's own.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        reduction: Callable[[Group], Reduction] = AllReduce,
        group_of: Callable[[torch.device], Group] = lambda device: None,
        accumulate: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        broadcast: bool = True,
    ) -> None:
        """Lay the gradients into buckets and listen for them.

        Args:
            module: the replica, on its devices already.
            reduction: makes what reduces the buckets of a process group.
            group_of: the process group of a device: its fellows in other replicas. None is all.
            accumulate: backward passes of a step, whose gradients are added up.
            bucket_bytes: most bytes of a bucket, but for single parameters that are larger.
            broadcast: take parameters and buffers over from the first rank.

        Raises:
            ValueError: nothing needs a gradient, or replicas differ in shapes, strides or devices.
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
        if broadcast:
            broadcast_state(module, group_of)
        self.reductions = {group: reduction(group) for group in self._queues}
        self._lock = threading.Lock()  # backward passes have a thread for each accelerator
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                functools.partial(self._arrived, group, bucket, number)
            )
            for group, queue in self._queues.items()
            for bucket in queue
            for number, member in enumerate(bucket.members)
        ]
        self.zero_grad()

    def zero_grad(self) -> None:
        """Begin a step; cheaper than the optimizer's own, after which views are made anew."""
        for bucket in self.buckets:
            bucket.adopt_all()
            bucket.flat.zero_()

    def finish(self) -> None:
        """Reduce what is left and wait for all of it: gradients are means then.

        Raises:
            RuntimeError: another rank is gone, or took longer than the timeout of the group.
        """
        with self._lock:
            for group, queue in self._queues.items():
                for bucket in queue:
                    if bucket.pending is None:
                        bucket.adopt_all()
                        bucket.pending = self.reductions[group].start(bucket)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            bucket.begin()

    def close(self) -> None:
        """Listen no more; gradients stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """What the reductions remember, in the order of their groups."""
        return {str(i): own.state_dict() for i, own in enumerate(self.reductions.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on this rank."""
        for i, own in enumerate(self.reductions.values()):
            own.load_state_dict(state[str(i)])

    def _arrived(self, group: Group, bucket: Bucket, number: int, _: torch.Tensor) -> None:
        with self._lock:
            bucket.arrive(number)
            for waiting in self._queues[group]:  # all ranks start those of a group in one order
                if waiting.pending is None:
                    if not waiting.is_full:
                        return
                    waiting.pending = self.reductions[group].start(waiting)


@torch.no_grad()
def broadcast_state(
    module: nn.Module, group_of: Callable[[torch.device], Group] = lambda device: None
) -> None:
    """Give every replica the parameters and buffers of the first rank of each group."""
    for tensor in (*module.parameters(), *module.buffers()):
        group = group_of(tensor.device)
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast(tensor.detach(), first, group=group)


def _form(queue: list[Bucket]) -> str:
    members = [(bucket, member) for bucket in queue for member in bucket.members]
    return "; ".join(
        f"{bucket.flat.device.type} {member.name} {tuple(member.parameter.shape)} "
        f"{member.parameter.stride()} {member.parameter.dtype}"
        for bucket, member in members
    )
