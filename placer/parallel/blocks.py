"""A data set served block by block, for training that is synchronised once in a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Blocks:
    """Batch ``number`` of tensors whose first dimension are the samples of a data set.

    A block is as many samples as all ranks take between two averages, and is split into a shard for
    each rank, which it goes through in batches: incremental block training (Chen and Huo, ICASSP
    2016). Blocks follow from their number, so that a run may stop at a border and go on. When all
    blocks were served the samples are shuffled anew; those that fill no block wait for another
    sweep. It serves as the data of a run, ``batch = Blocks((images, labels), ...)`` in a file::

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
        """Divide the data.

        Args:
            data: tensors (N, ...), in the order of a step's inputs.
            batch: samples of a batch.
            ranks: shards of a block; 1 where ranks share each batch, as a plan with ``--batch
                global`` has it.
            period: steps of a block, the period of the averages.
            accumulate: batches of a step of each rank, that of the run.
            seed: of the order of samples.

        Raises:
            ValueError: tensors have other numbers of samples, or too few for a block.
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
        self._order = (-1, torch.empty(0, dtype=torch.long))  # of the last sweep

    def __call__(self, number: int) -> tuple[torch.Tensor, ...]:
        """Batch ``number``: in a step every rank takes its own, in their order."""
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
