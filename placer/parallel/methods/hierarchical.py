"""All-reduce level by level, so that few bytes cross the slow links between nodes."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import functional as F

from placer.parallel.buckets import GradientBucket, Pending
from placer.parallel.groups import digests, new_group
from placer.parallel.methods.reductions import OfGroup, Then, all_gather, begun, reduce_scatter


class Hierarchical(OfGroup):
    """Averages by reduce-scatter within nodes, all-reduce across them, all-gather within.

    With more levels the middle part is done recursively (BlueConnect, Cho et al., MLSys 2019).
    Ranks of a node must be consecutive. A bucket's first reduce-scatter overlaps with the backward
    pass.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, levels: Sequence[int] | None = None
    ) -> None:
        """Create the process groups of all levels.

        Args:
            group: process group of the ranks, None for all.
            levels: ranks at each level, innermost first, such as (4, 8): 8 nodes of 4. By default
                the ranks of the group on each host, then the hosts.

        Raises:
            ValueError: the product of the levels is not the number of ranks of the group.
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
        inside = 1
        for size in self.levels:
            first = me - me // inside % size * inside
            fellows = [members[first + i * inside] for i in range(size)]
            if size > 1:
                self._groups.append(new_group(fellows))
            inside *= size

    def start(self, bucket: GradientBucket) -> Pending:
        """Start the innermost part; the other levels run in ``wait``."""
        flat = bucket.buffer().div_(self.ranks)
        if len(self._groups) < 2:
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
