"""One bit per number: its sign; per segment the means of its negative and of its other numbers.

Rows are coded independently, so that rows of many ranks can be coded at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray


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
        found = np.repeat(low, self.length, axis=-1)
        found ^= np.repeat(low ^ high, self.length, axis=-1) & -above.astype(np.int32)
        return torch.from_numpy(found.view(np.float32))


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

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row: a bit per number, two float32 per segment."""
        return self.length // 8 + 8 * self.count

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

    def only(self, row: int) -> Segments:
        """Return the segments of one row."""
        return Segments(self.of[row : row + 1], self.count)

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
    """Encode rows (R, L) float32 as uint8 (R, row_bytes); also return their decoded values (R, L).

    The two values of a segment are the means of its numbers below 0 and of the others, which
    minimize the squared error for these bits (Seide et al., "1-bit stochastic gradient descent",
    Interspeech 2014).
    """
    runs, numbers = segments.runs, rows.numpy().ravel()
    totals = np.zeros((len(rows), segments.count, 2), np.float32)
    counts = np.zeros_like(totals)
    above = numbers >= 0
    own = runs.row, runs.segment
    totals[*own, 0] = np.add.reduceat(np.minimum(numbers, 0), runs.start)
    totals[*own, 1] = np.add.reduceat(np.maximum(numbers, 0), runs.start)
    counts[*own, 1] = np.add.reduceat(above.view(np.uint8), runs.start, dtype=np.int64)
    counts[*own, 0] = runs.length - counts[*own, 1]
    values = (totals / np.maximum(counts, 1)).astype(np.float32, copy=False)
    bits = np.packbits(above.reshape(rows.shape), axis=1)
    wire = np.concatenate([bits, values.reshape(len(rows), -1).view(np.uint8)], 1)
    return torch.from_numpy(wire), runs.chosen(above, values[own]).view_as(rows)


def decode(wire: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Decode rows of bytes (R, row_bytes) to (R, L); a single row of segments applies to all."""
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
