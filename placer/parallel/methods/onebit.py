"""1-bit SGD: gradients are sent as bits; quantization errors are added to the next step.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from placer.parallel.bucket import GradientBucket, Pending
from placer.parallel.groups import wire_device
from placer.parallel.options import WARMUP_STEPS
from placer.parallel.quantised import Segments, decode, encode
from placer.parallel.reductions import AllReduce, Then, all_gather


@dataclass(slots=True)
class Coder:
    """Encoder and decoder of a bucket on one of R ranks, with its residuals (coding errors)."""

    segments: Segments  # of all R stripes
    mine: Segments  # of the stripe that this rank owns
    own: torch.Tensor  # (R, length) residuals of its own gradients
    stripe: torch.Tensor  # (1, length) residuals of the mean of its stripe

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], ranks: int, rank: int) -> Coder:
        """Return a coder for a bucket of parameters of these sizes, with zero residuals."""
        segments = Segments.of_sizes(list(sizes), ranks)
        empty = torch.zeros(segments.rows, segments.length)
        return cls(segments, segments.only(rank), empty, empty[:1].clone())

    def encoded(self, flat: torch.Tensor) -> torch.Tensor:
        """Encode gradients (P,), one row for the owner of each stripe."""
        padding = self.segments.of.numel() - flat.numel()
        due = F.pad(flat.to("cpu", torch.float32), (0, padding)).view_as(self.segments.of)
        due += self.own
        wire, sent = encode(due, self.segments)
        self.own = due - sent
        return wire

    def answer(self, got: torch.Tensor) -> torch.Tensor:
        """Encode the mean of this rank's stripe from the rows that all ranks have sent."""
        due = decode(got, self.mine).mean(0, keepdim=True) + self.stripe
        wire, sent = encode(due, self.mine)
        self.stripe = due - sent
        return wire.flatten()

    def decoded(self, answers: torch.Tensor) -> torch.Tensor:
        """Decode the mean, flat and padded, from the concatenated answers of all owners."""
        return decode(answers.view(self.segments.rows, -1), self.segments).flatten()


class OneBit:
    """Averages gradients sent as bits, with error feedback at both ends (sender and stripe owner).

    Rank k owns stripe k of a bucket: it receives the bits of all ranks for it, averages them, and
    sends the bits of the mean to all. Each parameter has its own two values in each stripe. All
    ranks decode the same bytes, so that parameters stay the same everywhere. Coding runs on the
    CPU, in float32.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, warmup_steps: int = WARMUP_STEPS
    ) -> None:
        """Start with zero residuals.

        Args:
            group: process group of the ranks, None for all.
            warmup_steps: initial steps with plain all-reduce; without any, training may diverge. At
                least 2 under DDP, which rebuilds its buckets after the first.
        """
        self.group = group
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._plain = AllReduce(group)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._coders: dict[int, Coder] = {}
        self._kept: Mapping[str, Mapping[str, torch.Tensor]] = {}  # residuals of a checkpoint

    def start(self, bucket: GradientBucket) -> Pending:
        """Send the bits of every stripe to its owner; ``wait`` collects the owners' answers."""
        warm = self.steps < self.warmup_steps
        self.steps += bucket.is_last()
        if warm:
            return self._plain.start(bucket)
        flat, coder = bucket.buffer(), self._coder_of(bucket)
        wire = coder.encoded(flat).to(wire_device(self.group))
        got = torch.empty_like(wire)
        work = dist.all_to_all_single(got, wire, group=self.group, async_op=True)
        assert work is not None

        def finish() -> None:
            answer = coder.answer(got.cpu()).to(wire_device(self.group))
            mean = coder.decoded(all_gather(answer, self.group).cpu())
            flat.copy_(mean[: flat.numel()])

        return Then(work, finish)

    def _coder_of(self, bucket: GradientBucket) -> Coder:
        index = bucket.index()
        if index not in self._coders:
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            self._coders[index] = coder = Coder.of_sizes(sizes, self._ranks, self._rank)
            if kept := self._kept.get(str(index)):
                coder.own, coder.stripe = kept["own"].clone(), kept["stripe"].clone()
        return self._coders[index]

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the residuals of this rank."""
        return {
            "steps": self.steps,
            "residuals": dict(self._kept)
            | {
                str(index): {"own": coder.own.clone(), "stripe": coder.stripe.clone()}
                for index, coder in self._coders.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        self.steps = state["steps"]
        self._kept, self._coders = state["residuals"], {}
