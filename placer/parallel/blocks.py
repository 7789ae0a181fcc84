"""A data set served block by block, for training that synchronizes once per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Blocks:
    """Batches of a data set of tensors (samples first), by number.

    A block holds the samples that all ranks take between two averages. It is split into one shard
    per rank, which the rank processes in batches: incremental block training (Chen and Huo, ICASSP
    2016). Blocks are determined by their number, so a run may stop at the end of a block and
    resume. After each sweep over all blocks the samples are reshuffled; those left over, too few
    for a block, wait for another sweep. It serves as the data of a run, ``batch = Blocks((images,
    labels), ...)`` in a file::

        python -m placer.run model.py:build --data file.py:batch --sync bmuf --period 16 ...
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
            ranks: shards per block; 1 if ranks share each batch, as in a plan with ``--batch
                global``.
            period: steps per block, the period of the averages.
            accumulate: batches per step of each rank, as in the run.
            seed: seed of the sample order.

        Raises:
            ValueError: tensors have different numbers of samples, or too few for a block.
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
        chosen = self._shuffled(sweep)[first : first + self.batch]
        return tuple(tensor[chosen] for tensor in self.data)

    def _shuffled(self, sweep: int) -> torch.Tensor:
        if self._order[0] != sweep:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + sweep)
            self._order = sweep, torch.randperm(self.samples, generator=random)
        return self._order[1]
