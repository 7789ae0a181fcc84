"""1-bit SGD: gradients are sent as bits, and what a bit leaves out is sent with the next step.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn import functional as F

from placer.parallel.bucket import GradientBucket, Pending
from placer.parallel.groups import wire_device
from placer.parallel.quantised import Segments, decode, encode
from placer.parallel.reductions import AllReduce, Then, all_gather

WARMUP_STEPS: Final = 200


@dataclass(slots=True)
class Residuals:
    """What was left out of a bucket so far: of its own gradients, of the mean of its stripe."""

    own: torch.Tensor  # (ranks, length)
    stripe: torch.Tensor  # (1, length)


class OneBit:
    """The mean by bits, with error feedback where they are made: at both ends.

    Rank k owns stripe k of a bucket: it is sent the bits of all ranks for it, averages them, and
    sends the bits of the mean to all. Each parameter has two values of its own in a stripe. All
    ranks decode the same bytes, so that parameters stay the same everywhere. Coding runs on the
    CPU, in float32.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, warmup_steps: int = WARMUP_STEPS
    ) -> None:
        """Begin without residuals.

        Args:
            group: of the ranks, None is all.
            warmup_steps: with plain all-reduce before; without any, training may diverge. Under DDP
                at least 2, since it fills its buckets anew after the first.
        """
        self.group = group
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._plain = AllReduce(group)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._segments: dict[int, Segments] = {}
        self._residuals: dict[int, Residuals] = {}

    def start(self, bucket: GradientBucket) -> Pending:
        """Send the bits of every stripe to its owner; the owners' answers are awaited later."""
        warm = self.steps < self.warmup_steps
        self.steps += bucket.is_last()
        if warm:
            return self._plain.start(bucket)
        flat, segments = bucket.buffer(), self._segments_of(bucket)
        residuals = self._residuals_of(bucket.index(), segments)
        padding = segments.of.numel() - flat.numel()
        due = F.pad(flat.to("cpu", torch.float32), (0, padding)).view_as(segments.of)
        due += residuals.own
        wire, sent = encode(due, segments)
        residuals.own = due - sent
        wire = wire.to(wire_device(self.group))
        got = torch.empty_like(wire)
        work = dist.all_to_all_single(got, wire, group=self.group, async_op=True)
        assert work is not None

        def finish() -> None:
            mean = self._mean(got.cpu(), segments, residuals)
            flat.copy_(mean.flatten()[: flat.numel()])

        return Then(work, finish)

    def _mean(self, got: torch.Tensor, segments: Segments, residuals: Residuals) -> torch.Tensor:
        """All stripes of the mean, (ranks, length), of the bits of this rank's stripe."""
        mine = segments.only(self._rank)
        due = decode(got, mine).mean(0, keepdim=True) + residuals.stripe
        wire, sent = encode(due, mine)
        residuals.stripe = due - sent
        every = all_gather(wire.flatten().to(wire_device(self.group)), self.group)
        return decode(every.cpu().view(self._ranks, -1), segments)

    def _segments_of(self, bucket: GradientBucket) -> Segments:
        index = bucket.index()
        if index not in self._segments:
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            self._segments[index] = Segments.of_sizes(sizes, self._ranks)
        return self._segments[index]

    def _residuals_of(self, index: int, segments: Segments) -> Residuals:
        if index not in self._residuals:
            empty = torch.zeros(segments.rows, segments.length)
            self._residuals[index] = Residuals(empty, empty[:1].clone())
        return self._residuals[index]

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, and the residuals of this rank."""
        return {
            "steps": self.steps,
            "residuals": {
                str(index): {"own": kept.own.clone(), "stripe": kept.stripe.clone()}
                for index, kept in self._residuals.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on this rank."""
        self.steps = state["steps"]
        self._residuals = {
            int(index): Residuals(kept["own"].clone(), kept["stripe"].clone())
            for index, kept in state["residuals"].items()
        }
