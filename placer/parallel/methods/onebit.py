"""1-bit SGD: gradients are sent as bits; quantization errors are added to the next step.

A bit per number is its sign; each segment has the means of its negative and of its other numbers.
Rows are coded independently, so that rows of many ranks can be coded at once.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional as F

from placer.parallel.buckets import Bucket, Pending
from placer.parallel.methods.reductions import AllReduce, Then, all_gather, as_real, begun
from placer.parallel.methods.registry import WARMUP_STEPS
from placer.parallel.processes import wire_device


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The K contiguous runs of numbers in one segment, row by row."""

    row: NDArray[np.int64]  # (K,)
    segment: NDArray[np.int64]  # (K,)
    start: NDArray[np.int64]  # (K,) counted through all rows
    length: NDArray[np.int64]  # (K,)

    def chosen(self, above: NDArray[np.bool_], values: NDArray[np.float32]) -> torch.Tensor:
        """Return for each number one of the two values (..., K, 2) of its run, (..., N).

        ``above`` selects the second value. Uses bit operations: selecting per number takes ten
        times as long.
        """
        low, high = np.moveaxis(values.view(np.int32), -1, 0)
        bits = np.repeat(low, self.length, axis=-1)
        bits ^= np.repeat(low ^ high, self.length, axis=-1) & -above.astype(np.int32)
        return torch.from_numpy(bits.view(np.float32))


@dataclass(frozen=True)
class Segments:
    """The segment of each of the ``length`` numbers of a row: ``of`` (rows, length) int64.

    Lengths are multiples of 8; segments are numbered from 0 in every row, at most ``count`` of
    them, and the numbers of a segment are contiguous.
    """

    of: torch.Tensor
    count: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.of)

    @property
    def length(self) -> int:
        """Numbers per row."""
        return self.of.shape[1]

    @cached_property
    def runs(self) -> Runs:
        """The segments as contiguous runs: sums over these take a fifth of the time."""
        of = self.of.numpy()
        begins = np.ones(of.shape, np.bool_)
        begins[:, 1:] = of[:, 1:] != of[:, :-1]
        start = np.flatnonzero(begins)
        row = start // self.length
        length = np.diff(start, append=of.size)
        return Runs(row=row, segment=of.ravel()[start], start=start, length=length)

    @classmethod
    def of_sizes(cls, sizes: list[int], stripes: int) -> Segments:
        """Lay parameters of these sizes out one after the other and cut them into equal stripes.

        A segment is the part of a parameter in a stripe. The padding at the end, which makes the
        stripes equal and multiples of 8, is a segment of its own.

        >>> Segments.of_sizes([10, 6], stripes=2).of.tolist()
        [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
        """
        length = -(-sum(sizes) // (8 * stripes)) * 8
        filled = [size for size in (*sizes, length * stripes - sum(sizes)) if size]
        owner = torch.repeat_interleave(torch.arange(len(filled)), torch.tensor(filled))
        owner = owner.view(stripes, length)
        of = owner - owner[:, :1]
        return cls(of, int(of.max()) + 1)


def encode(rows: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode rows (R, L) float32 as uint8 (R, B); also return their decoded values (R, L).

    The B bytes of a row are a bit per number and two float32 per segment, L / 8 + 8 count.
    The two values of a segment are the means of its numbers below 0 and of the others, which
    minimize the squared error for these bits (Seide et al.).
    """
    runs, numbers = segments.runs, rows.numpy().ravel()
    totals = np.zeros((len(rows), segments.count, 2), np.float32)
    counts = np.zeros_like(totals)
    above = numbers >= 0
    at = runs.row, runs.segment
    totals[*at, 0] = np.add.reduceat(np.minimum(numbers, 0), runs.start)
    totals[*at, 1] = np.add.reduceat(np.maximum(numbers, 0), runs.start)
    counts[*at, 1] = np.add.reduceat(above.view(np.uint8), runs.start, dtype=np.int64)
    counts[*at, 0] = runs.length - counts[*at, 1]
    values = (totals / np.maximum(counts, 1)).astype(np.float32, copy=False)
    bits = np.packbits(above.reshape(rows.shape), axis=1)
    wire = np.concatenate([bits, values.reshape(len(rows), -1).view(np.uint8)], 1)
    return torch.from_numpy(wire), runs.chosen(above, values[at]).view_as(rows)


def decode(wire: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Decode rows of bytes (R, B) to (R, L); a single row of segments applies to all."""
    runs, coded = segments.runs, wire.numpy()
    border = segments.length // 8
    above = np.unpackbits(coded[:, :border], axis=1).view(np.bool_)
    values = np.ascontiguousarray(coded[:, border:]).view(np.float32)
    values = values.reshape(len(wire), segments.count, 2)
    if segments.rows == 1:
        of_runs = values[:, runs.segment]  # (R, K, 2)
    else:
        of_runs, above = values[runs.row, runs.segment][None], above.reshape(1, -1)
    return runs.chosen(above, of_runs).view(len(wire), segments.length)


@dataclass(slots=True)
class Coder:
    """Encoder and decoder of a bucket on one of R ranks, with its residuals (coding errors)."""

    segments: Segments  # of all R stripes
    mine: Segments  # of the stripe that this rank owns
    residual: torch.Tensor  # (R, length) of the gradients of this rank
    stripe: torch.Tensor  # (1, length) residuals of the mean of its stripe

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], ranks: int, rank: int) -> Coder:
        """Return a coder for a bucket of parameters of these sizes, with zero residuals."""
        segments = Segments.of_sizes(list(sizes), ranks)
        mine = Segments(segments.of[rank : rank + 1], segments.count)
        return cls(segments, mine, torch.zeros(segments.of.shape), torch.zeros(mine.of.shape))

    def encoded(self, flat: torch.Tensor) -> torch.Tensor:
        """Encode gradients (P,), one row for the owner of each stripe."""
        padding = self.segments.of.numel() - flat.numel()
        due = F.pad(flat.to("cpu", torch.float32), (0, padding)).view_as(self.segments.of)
        due += self.residual
        wire, sent = encode(due, self.segments)
        self.residual = _finite(due - sent)
        return wire

    def answer(self, received: torch.Tensor) -> torch.Tensor:
        """Encode the mean of this rank's stripe from the rows that all ranks have sent."""
        due = decode(received, self.mine).mean(0, keepdim=True) + self.stripe
        wire, sent = encode(due, self.mine)
        self.stripe = _finite(due - sent)
        return wire.flatten()

    def decoded(self, answers: torch.Tensor) -> torch.Tensor:
        """Decode the mean, flat and padded, from the concatenated answers of all owners."""
        return decode(answers.view(self.segments.rows, -1), self.segments).flatten()


def _finite(errors: torch.Tensor) -> torch.Tensor:
    """Return coding errors without those of a gradient that overflowed, which would never end."""
    return errors.nan_to_num_(0.0, 0.0, 0.0)


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

        Without ``warmup_steps`` of plain all-reduce training may diverge; under DDP, which rebuilds
        its buckets after the first, they are at least 2.
        """
        self.group = group
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._plain = AllReduce(group)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._coders: dict[int, Coder] = {}
        self._restored: Mapping[str, Mapping[str, torch.Tensor]] = {}  # residuals of a checkpoint

    def start(self, bucket: Bucket) -> Pending:
        """Send the bits of every stripe to its owner; ``wait`` collects the owners' answers."""
        warm = self.steps < self.warmup_steps
        self.steps += bucket.is_last()
        if warm:
            return self._plain.start(bucket)
        flat, coder = as_real(bucket.buffer()), self._coder_of(bucket)
        wire = coder.encoded(flat).to(wire_device(self.group))
        received = torch.empty_like(wire)
        work = begun(dist.all_to_all_single(received, wire, group=self.group, async_op=True))

        def finish() -> None:
            answer = coder.answer(received.cpu()).to(wire_device(self.group))
            mean = coder.decoded(all_gather(answer, self.group).cpu())
            flat.copy_(mean[: flat.numel()])

        return Then(work, finish)

    def _coder_of(self, bucket: Bucket) -> Coder:
        index = bucket.index()
        if index not in self._coders:
            sizes = [p.numel() * (1 + p.is_complex()) for p in bucket.parameters()]
            self._coders[index] = coder = Coder.of_sizes(sizes, self._ranks, self._rank)
            if kept := self._restored.get(str(index)):
                coder.residual, coder.stripe = kept["residual"].clone(), kept["stripe"].clone()
        return self._coders[index]

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the residuals of this rank."""
        return {
            "steps": self.steps,
            "residuals": dict(self._restored)
            | {
                str(index): {"residual": coder.residual.clone(), "stripe": coder.stripe.clone()}
                for index, coder in self._coders.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        self.steps = state["steps"]
        self._restored, self._coders = state["residuals"], {}
