from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placer.parallel import Blocks
from placer.parallel.data import numbers_of

COUNTS = st.integers(1, 4)


@given(
    batch=COUNTS,
    ranks=COUNTS,
    period=COUNTS,
    blocks=COUNTS,
    accumulate=COUNTS,
    rest=st.integers(0, 3),
)
def test_a_sweep_takes_every_sample_of_its_blocks_once(
    batch: int, ranks: int, period: int, blocks: int, accumulate: int, rest: int
) -> None:
    block = batch * ranks * period * accumulate
    samples = block * blocks + min(rest, block - 1)
    serve = Blocks(
        (torch.arange(samples),), batch=batch, ranks=ranks, period=period, accumulate=accumulate
    )
    assert serve.count == blocks
    for sweep in range(2):
        first = sweep * blocks * period
        taken = torch.cat(
            [
                serve(number)[0]
                for step in range(first, first + blocks * period)
                for rank in range(ranks)
                for number in numbers_of(step, rank, ranks, accumulate)
            ]
        ).tolist()
        assert len(taken) == len(set(taken)) == block * blocks


@given(batch=COUNTS, ranks=COUNTS, period=COUNTS, accumulate=COUNTS, block=COUNTS)
def test_a_rank_goes_through_a_shard_of_its_own_whatever_is_accumulated(
    batch: int, ranks: int, period: int, accumulate: int, block: int
) -> None:
    """The shards are those of longer blocks without accumulation."""
    data = (torch.arange(2 * batch * ranks * period * accumulate),)
    serve = Blocks(data, batch=batch, ranks=ranks, period=period, accumulate=accumulate)
    plain = Blocks(data, batch=batch, ranks=ranks, period=period * accumulate)
    for rank in range(ranks):
        own, expected = (
            [
                one(number)[0].tolist()
                for step in range(block * steps, (block + 1) * steps)
                for number in numbers_of(step, rank, ranks, passes)
            ]
            for one, steps, passes in ((serve, period, accumulate), (plain, plain.period, 1))
        )
        assert own == expected


def test_a_block_is_shuffled_by_its_sweep_and_seed_and_comes_again() -> None:
    data = torch.arange(64), -torch.arange(64)

    def first_block(seed: int, sweep: int = 0) -> list[int]:
        serve = Blocks(data, batch=2, ranks=2, period=4, seed=seed)
        found = [serve(sweep * 64 // 2 + number) for number in range(8)]
        assert all(torch.equal(x, -y) for x, y in found)
        return [int(sample) for x, _ in found for sample in x]

    assert first_block(0) == first_block(0)
    assert first_block(0) != first_block(1)
    assert first_block(0) != first_block(0, sweep=1)


def test_data_that_make_no_block_are_refused() -> None:
    with pytest.raises(ValueError, match="7 samples fill no block of 2 x 2 batches of 2"):
        Blocks((torch.ones(7),), batch=2, ranks=2, period=2)
    with pytest.raises(ValueError, match=r"\[3, 4\] samples"):
        Blocks((torch.ones(3), torch.ones(4)), batch=1, ranks=1, period=1)
