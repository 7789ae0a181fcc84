"""Numbered batches: of a function, made up, cut into parts, and of a data set by blocks."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placer.parallel.data import Blocks, FromFunction, MadeUp, Shards, numbers_of
from placer.sources.target import load_function, load_step
from tests.helpers.tiny_models import assert_same, conv_net, tied_weights


def test_made_up_batches_have_the_form_of_the_example_and_come_again() -> None:
    step = tied_weights()
    batches = MadeUp(step, seed=3)
    (tokens, targets), keywords = batches(5)
    assert tokens.shape == step.inputs[0].shape
    assert tokens.dtype == step.inputs[0].dtype
    assert sorted(tokens.flatten().tolist()) == sorted(step.inputs[0].flatten().tolist())
    assert not keywords
    for again, once in zip(batches(5)[0], (tokens, targets), strict=True):
        assert torch.equal(again, once)
    assert not torch.equal(batches(6)[0][0], tokens)
    images = MadeUp(conv_net())(0)[0][0]
    assert abs(images.std() - conv_net().inputs[0].std()) < 0.1


def test_batches_of_a_function_are_taken_apart_like_the_targets() -> None:
    step = conv_net()
    images, labels = step.inputs
    batches = FromFunction(lambda number: {"input": images + number, "y": labels}, step)
    found, keywords = batches(2)
    assert_same(found, (images + 2, labels))  # in the form of the example
    assert not keywords


def test_a_function_that_fails_is_named_with_its_batch() -> None:
    step = conv_net()
    batches = FromFunction([step.inputs].__getitem__, step)
    batches(0)
    with pytest.raises(ValueError, match="the data function failed for batch 3: IndexError: list"):
        batches(3)


def test_data_of_the_targets_own_file_has_the_targets_classes(tmp_path: Path) -> None:
    text = """
    import torch
    from dataclasses import dataclass

    @dataclass
    class Pair:
        x: torch.Tensor

    class Model(torch.nn.Module):
        def forward(self, pair):
            return pair.x * 2

    def build():
        return Model(), (Pair(torch.ones(2)),)

    def batch(number):
        return (Pair(torch.full((2,), float(number))),)
    """
    files = [tmp_path / folder / "model.py" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(textwrap.dedent(text))
    for file in files:
        step = load_step(f"{file}:build", training=False)
        ((pair,), _) = FromFunction(load_function(f"{file}:batch"), step)(3)
        assert type(pair) is type(step.inputs[0])
        assert sys.modules[type(pair).__module__].__file__ == str(file)
        assert step.model(pair).tolist() == [6.0, 6.0]


def test_shards_of_a_batch_are_the_whole_of_it() -> None:
    step = conv_net()
    whole = MadeUp(step, seed=1)
    shards = Shards(whole, 2)
    parts = [shards(number)[0] for number in (6, 7)]
    for shard, tensor in zip(zip(*parts, strict=True), whole(3)[0], strict=True):
        assert torch.equal(torch.cat(shard), tensor)
    with pytest.raises(ValueError, match="3 equal parts"):
        Shards(whole, 3)(0)


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
        served = [serve(sweep * 64 // 2 + number) for number in range(8)]
        assert all(torch.equal(x, -y) for x, y in served)
        return [int(sample) for x, _ in served for sample in x]

    assert first_block(0) == first_block(0)
    assert first_block(0) != first_block(1)
    assert first_block(0) != first_block(0, sweep=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((7,), "7 samples fill no block of 1 x 2 batches of 4"), ((3, 4), r"\[3, 4\] samples")],
)
def test_data_that_fill_no_block_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blocks([torch.ones(size) for size in sizes], batch=4, ranks=1, period=2)
