"""Reductions of buckets: sums in full or half precision, level by level, DDP hooks, PowerSGD."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F

from placer.parallel.buckets import Bucket, Pending
from placer.parallel.methods.registry import WARMUP_STEPS
from placer.parallel.processes import digests, new_group

_POWER_SGD_TENSORS: Final = ("error_dict", "p_memory_dict", "q_memory_dict")


class Reduction(Protocol):
    """Averages the buckets of one process group over its ranks; stateless by default."""

    def start(self, bucket: Bucket) -> Pending:
        """Start reducing a bucket; every rank starts the same buckets in the same order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state kept between steps, such as residuals: tensors, numbers and strings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        assert not state, "this reduction keeps no state"


class GroupReduction(Reduction):
    """A stateless reduction over a process group, None for all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)


class AllReduce(GroupReduction):
    """Averages with the all-reduce of the backend."""

    def start(self, bucket: Bucket) -> Pending:
        """Start the all-reduce of the gradients."""
        flat = bucket.buffer().div_(self.ranks)
        return begun(dist.all_reduce(flat, group=self.group, async_op=True))


class Float16(GroupReduction):
    """Averages gradients that are sent, and added, in half precision."""

    dtype = torch.float16

    def start(self, bucket: Bucket) -> Pending:
        """Start the all-reduce in the narrow dtype; divide first, since sums may overflow fp16."""
        flat = as_real(bucket.buffer())
        narrow = flat.div_(self.ranks).to(self.dtype)
        work = begun(dist.all_reduce(narrow, group=self.group, async_op=True))
        return Then(work, lambda: flat.copy_(narrow))


class BFloat16(Float16):
    """The same in bfloat16."""

    dtype = torch.bfloat16


class Hierarchical(GroupReduction):
    """Averages by reduce-scatter within nodes, all-reduce across them, all-gather within.

    With more levels the middle part is done recursively (BlueConnect, Cho et al., MLSys 2019).
    Ranks of a node must be consecutive. A bucket's first reduce-scatter overlaps with the backward
    pass. Between ranks that share GPUs, where gloo reduces, there is one all-reduce: whether
    gloo scatters sums of tensors on GPUs was not tried.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, levels: Sequence[int] | None = None
    ) -> None:
        """Create the process groups of all levels.

        ``levels`` are ranks at each level, innermost first, such as (4, 8): 8 nodes of 4. By
        default they are the ranks of the group on each host, then the hosts.
        """
        super().__init__(group)
        self.levels = tuple(levels or levels_of(digests(socket.gethostname(), group)))
        if math.prod(self.levels) != self.ranks:
            raise ValueError(
                f"levels {'x'.join(map(str, self.levels))} have {math.prod(self.levels)} ranks, "
                f"the group has {self.ranks}"
            )
        members, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        self._groups: list[dist.ProcessGroup] = []
        self._has_nccl = "cuda:nccl" in dist.get_backend_config(group)
        inside = 1
        for size in self.levels:
            first = me - me // inside % size * inside
            peers = [members[first + i * inside] for i in range(size)]
            if size > 1:
                self._groups.append(new_group(peers))
            inside *= size

    def start(self, bucket: Bucket) -> Pending:
        """Start the innermost part; the other levels run in ``wait``."""
        flat = bucket.buffer().div_(self.ranks)
        if len(self._groups) < 2 or (flat.is_cuda and not self._has_nccl):
            return begun(dist.all_reduce(flat, group=self.group, async_op=True))
        inner, *outer = self._groups
        padded = _padded(flat, inner)
        part = padded.new_empty(len(padded) // inner.size())
        work = reduce_scatter(part, padded, inner)
        return Then(work, lambda: flat.copy_(_gathered(part, inner, outer, len(flat))))


def levels_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return (ranks per host, hosts) if all hosts have equally many, consecutive ranks.

    Otherwise, or if each host has a single rank, return one level of all ranks.

    >>> levels_of(["a", "a", "b", "b", "c", "c"]), levels_of(["a", "b"]), levels_of(["a", "a", "b"])
    ((2, 3), (2,), (3,))
    """
    ranks, count = len(hosts), len(set(hosts))
    inside = ranks // count
    are_neighbours = all(hosts[i] == hosts[i - i % inside] for i in range(ranks))
    return (inside, count) if 1 < inside < ranks == inside * count and are_neighbours else (ranks,)


def _gathered(
    part: torch.Tensor, inner: dist.ProcessGroup, outer: Sequence[dist.ProcessGroup], size: int
) -> torch.Tensor:
    # ``part`` is what this rank has reduced within ``inner``; returns the whole tensor.
    if len(outer) == 1:
        dist.all_reduce(part, group=outer[0])
    else:
        padded = _padded(part, outer[0])
        smaller = padded.new_empty(len(padded) // outer[0].size())
        reduce_scatter(smaller, padded, outer[0]).wait()
        part = _gathered(smaller, outer[0], outer[1:], len(part))
    return all_gather(part, inner)[:size]


def _padded(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return F.pad(flat, (0, -len(flat) % group.size()))


class HookReduction(Reduction):
    """A DDP communication hook, ``hook(state, bucket)``, as a reduction."""

    def __init__(
        self, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]], state: Any
    ) -> None:
        """Wrap a hook and its state, which holds the process group."""
        self.hook = hook
        self.state = state

    def start(self, bucket: Bucket) -> Pending:
        """Call the hook; ``wait`` copies the mean of its future into the bucket."""
        flat, future = bucket.buffer(), self.hook(self.state, bucket)

        def take() -> None:
            mean = future.value()
            if mean.data_ptr() != flat.data_ptr():
                flat.copy_(mean)

        return Then(future, take)


class PowerSgd(HookReduction):
    """PowerSGD from torch: gradient matrices are sent as products of two low-rank factors.

    With error feedback (Vogels, Karimireddy and Jaggi, NeurIPS 2019). Torch's hook begins its
    further collectives on threads of the backend, in an order that may differ between ranks: one
    bucket at a time is reduced.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        approximation_rank: int = 2,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        """Set the rank of the approximation and the number of initial plain all-reduce steps."""
        if warmup_steps < 2:  # torch requires buckets that no longer change
            raise ValueError(f"PowerSGD begins after 2 steps at the earliest, not {warmup_steps}")
        state = PowerSGDState(
            process_group=group if group is not None else dist.group.WORLD,
            matrix_approximation_rank=approximation_rank,
            start_powerSGD_iter=warmup_steps,
        )
        super().__init__(powerSGD_hook, state)
        self._before: Pending | None = None

    def start(self, bucket: Bucket) -> Pending:
        """Call the hook, with what is kept of this bucket on its device; checkpoints load on CPUs.

        Raises:
            ValueError: the gradients are complex, or the bucket is on the CPU while torch sees
                GPUs: its hook then waits for one.
        """
        device = bucket.buffer().device
        if bucket.buffer().is_complex():
            raise ValueError("torch's PowerSGD reduces real gradients only: choose another method")
        if device.type == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "torch's PowerSGD does not reduce gradients on the CPU where there are GPUs: "
                "choose another method, or hide the GPUs by CUDA_VISIBLE_DEVICES="
            )
        for name in _POWER_SGD_TENSORS:
            kept = getattr(self.state, name)
            if (tensor := kept.get(bucket.index())) is not None:
                kept[bucket.index()] = tensor.to(device)
        if self._before is not None:
            self._before.wait()
        pending = super().start(bucket)
        self._before = None if bucket.is_last() else pending
        return pending

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, the residuals, the factors and the random generator's state."""
        kind, keys, *rest = self.state.rng.get_state()
        kept = {
            name: {str(i): tensor.clone() for i, tensor in getattr(self.state, name).items()}
            for name in _POWER_SGD_TENSORS
        }
        random = {"kind": kind, "keys": torch.from_numpy(keys.astype(np.int64)), "rest": rest}
        return {**kept, "iter": self.state.iter, "random": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        for name in _POWER_SGD_TENSORS:
            tensors = {int(index): tensor.clone() for index, tensor in state[name].items()}
            setattr(self.state, name, tensors)
        self.state.iter = state["iter"]
        random = state["random"]
        keys = random["keys"].numpy().astype(np.uint32)
        self.state.rng.set_state((random["kind"], keys, *random["rest"]))


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


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor (P,), or complex (P / 2,) as a view of its parts (P,)."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


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
