"""An all-reduce level by level: few bytes cross the slow links between nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import functional as F

from placer.parallel.bucket import GradientBucket, Pending
from placer.parallel.groups import new_group
from placer.parallel.reductions import OfGroup, Then, all_gather, begun, reduce_scatter


class Hierarchical(OfGroup):
    """The mean by reduce-scatter inside the nodes, all-reduce across them, all-gather inside.

    With more levels the middle part is done the same way (BlueConnect, Cho et al., MLSys 2019).
    Ranks of a node are neighbours. A bucket's first reduce-scatter runs beside the backward pass.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, levels: Sequence[int] | None = None
    ) -> None:
        """Make the process groups of all levels.

        Args:
            group: of all ranks.
            levels: ranks at each level, innermost first, such as (4, 8): 8 nodes of 4. By default
                the ranks of this host, then the hosts, as torchrun tells them.

        Raises:
            ValueError: the levels do not multiply to the ranks of the group.
        """
        super().__init__(group)
        self.levels = tuple(levels or levels_here(self.ranks))
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
        """Send the innermost part; the others are sent when it is awaited."""
        flat = bucket.buffer().div_(self.ranks)
        if len(self._groups) < 2:
            return begun(dist.all_reduce(flat, group=self.group, async_op=True))
        inner, *outer = self._groups
        padded = _padded(flat, inner)
        part = padded.new_empty(len(padded) // inner.size())
        work = reduce_scatter(part, padded, inner)
        return Then(work, lambda: flat.copy_(_gathered(part, inner, outer, len(flat))))


def levels_here(ranks: int) -> tuple[int, ...]:
    """Ranks of a host and hosts, as torchrun's environment tells them; one level elsewhere."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return (local, ranks // local) if 0 < local < ranks and ranks % local == 0 else (ranks,)


def _gathered(
    part: torch.Tensor, inner: dist.ProcessGroup, outer: Sequence[dist.ProcessGroup], size: int
) -> torch.Tensor:
    """The whole of a tensor of which this rank has reduced a part with its inner fellows."""
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
