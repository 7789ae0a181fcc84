"""One bit per number: signs, and for each segment the mean of what is negative and of the rest.

Rows are coded one by one, so that many ranks' rows can be coded at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Segments:
    """Which segment each of ``length`` numbers of a row is in: ``of`` (rows, length) int64.

    Lengths are multiples of 8; segments are numbered from 0 in every row, ``count`` at most.
    """

    of: torch.Tensor
    count: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.of)

    @property
    def length(self) -> int:
        """How many numbers a row has."""
        return self.of.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a coded row: a bit per number, two float32 per segment."""
        return self.length // 8 + 8 * self.count

    def only(self, row: int) -> Segments:
        """The segments of one row."""
        return Segments(self.of[row : row + 1], self.count)

    @classmethod
    def of_sizes(cls, sizes: list[int], stripes: int) -> Segments:
        """Parameters of these sizes, laid out one after the other and cut into equal stripes.

        A segment is what a stripe has of a parameter. What is added at the end to make stripes
        equal, and multiples of 8, is a segment of its own.

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
    """Rows (R, L) float32 as bytes (R, row_bytes) uint8, and what they will be decoded to (R, L).

    The two values of a segment are the means of its numbers below 0 and of the others: those of
    the least squared error for these bits (Seide et al., "1-bit stochastic gradient descent",
    Interspeech 2014).
    """
    place = 2 * segments.of + (rows >= 0)
    totals = rows.new_zeros(len(rows), 2 * segments.count).scatter_add_(1, place, rows)
    counts = torch.zeros_like(totals).scatter_add_(1, place, torch.ones_like(rows))
    values = totals / counts.clamp_(min=1)
    bits = np.packbits((place & 1).numpy().astype(np.uint8), axis=1)
    wire = torch.cat([torch.from_numpy(bits), values.view(torch.uint8)], 1)
    return wire, values.gather(1, place)


def decode(wire: torch.Tensor, segments: Segments) -> torch.Tensor:
    """What rows of bytes (R, row_bytes) stand for, (R, L); one row of segments holds for all."""
    border = segments.length // 8
    bits = torch.from_numpy(np.unpackbits(wire[:, :border].numpy(), axis=1)).long()
    values = wire[:, border:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values.gather(1, 2 * segments.of.expand(len(wire), -1) + bits)
