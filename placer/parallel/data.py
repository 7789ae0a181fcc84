"""Numbered batches: every rank takes its own, and a resumed run continues with the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from graphs.extract import Workload
from placer.sources.batches import part_of_batch

Batch: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional inputs and keywords of a training step, including the target of its loss."""
Batches: TypeAlias = Callable[[int], Batch]
"""Training data: a number, counted from 0, gives the same batch on every rank and in every run."""


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Random batches with the shapes of the example inputs; losses on them mean nothing.

    Floating-point values are normal, with the mean and standard deviation of the example; other
    values are a permutation of the example's, so that indices stay in range.
    """

    step: Workload
    seed: int = 0

    def __call__(self, number: int) -> Batch:
        """Return batch ``number``."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)

        def like(example: torch.Tensor) -> torch.Tensor:
            example = example.detach().cpu()
            if not example.is_floating_point():
                order = torch.randperm(example.numel(), generator=random)
                return example.flatten()[order].view_as(example)
            noise = torch.randn(example.shape, generator=random, dtype=example.dtype)
            spread = example.std() if example.numel() > 1 else 1.0
            return noise * spread + example.mean()

        inputs, keywords = self.step.step_inputs, dict(self.step.keywords)
        made: Batch = tree_map_only(torch.Tensor, like, (inputs, keywords))
        return made


@dataclass(frozen=True, slots=True)
class FromFunction:
    """Batches from a function that takes a number and returns inputs like the target's."""

    function: Callable[[int], Any]
    step: Workload

    def __call__(self, number: int) -> Batch:
        """Return batch ``number``; raise ValueError if the function fails."""
        try:
            made = self.function(number)
        except (ValueError, OSError, RuntimeError, MemoryError):
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise ValueError(f"the data function failed for batch {number}: {failure}") from error
        return self.step.unpacked((made,), {})


class Shards:
    """Batches cut into equal parts along the first dimension of their tensors.

    Batch ``number`` is part ``number % parts`` of the whole batch ``number // parts``.
    """

    def __init__(self, whole: Batches, parts: int) -> None:
        self.whole = whole
        self.parts = parts
        self._last: tuple[int, Batch] | None = None  # a rank may take several parts in a row

    def __call__(self, number: int) -> Batch:
        """Return batch ``number``."""
        whole, part = divmod(number, self.parts)
        if self._last is None or self._last[0] != whole:
            self._last = whole, self.whole(whole)
        shard: Batch = part_of_batch(self._last[1], self.parts, part)
        return shard


def numbers_of(step: int, rank: int, ranks: int, accumulate: int = 1) -> range:
    """Return the batch numbers of a rank in a step; each batch goes to exactly one rank."""
    first = (step * ranks + rank) * accumulate
    return range(first, first + accumulate)


class Blocks:
    """Batches of a data set of tensors (samples first), by number.

    A block holds the samples that all ranks take between two averages. It is split into one shard
    per rank, which the rank processes in batches: incremental block training (Chen and Huo, ICASSP
    2016). Blocks are determined by their number, so a run may stop at the end of a block and
    resume. After each sweep over all blocks the samples are reshuffled; those left over, too few
    for a block, wait for another sweep. It serves as the data of a run, ``batch = Blocks((images,
    labels), ...)`` in a file::

        python -m placer.run model.py:build --data file.py:batch --sync bmuf,period=16 ...
    """

    def __init__(
        self,
        data: Sequence[torch.Tensor],
        *,
        batch: int,
        ranks: int,
        period: int,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        """Divide the data into blocks.

        Args:
            data: tensors (N, ...), in the order of a step's inputs.
            batch: samples per batch.
            ranks: shards per block; 1 if ranks share each batch, as in a plan with a global batch.
            period: steps per block, the period of the averages.
            accumulate: batches per step of each rank, as in the run.
            seed: seed of the sample order.
        """
        sizes = {len(tensor) for tensor in data}
        if len(sizes) != 1:
            raise ValueError(f"tensors have {sorted(sizes)} samples: give as many of each")
        [self.samples] = sizes
        self.data = tuple(data)
        self.batch = batch
        self.ranks = ranks
        self.period = period
        self.accumulate = accumulate
        self.seed = seed
        self.block = batch * ranks * period * accumulate
        self.count = self.samples // self.block
        if not self.count:
            raise ValueError(
                f"{self.samples} samples fill no block of {ranks} x {period * accumulate} batches "
                f"of {batch}"
            )
        self._order = (-1, torch.empty(0, dtype=torch.long))  # (sweep, its permutation)

    def __call__(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return batch ``number``; within a step every rank takes its own, in order of ranks."""
        turn, part = divmod(number, self.accumulate)
        step, rank = divmod(turn, self.ranks)
        block, at = divmod(step, self.period)
        sweep, place = divmod(block, self.count)
        passes = (rank * self.period + at) * self.accumulate + part
        first = place * self.block + passes * self.batch
        if self._order[0] != sweep:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + sweep)
            self._order = sweep, torch.randperm(self.samples, generator=random)
        chosen = self._order[1][first : first + self.batch]
        return tuple(tensor[chosen] for tensor in self.data)
