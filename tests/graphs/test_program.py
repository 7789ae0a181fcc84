"""Sizes of a program's values, compared with those of torch tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.extract.program import Value

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_overlap_span_and_size_are_those_of_the_elements_addresses(
    shape: list[int], data: st.DataObject
) -> None:
    stride = [data.draw(st.integers(0, 20)) for _ in shape]
    value = Value(tuple(shape), tuple(stride), torch.float32, 0)
    flat = torch.arange(2000)
    addresses = flat.as_strided(shape, stride).flatten().tolist()
    assert value.numel == len(addresses)
    assert value.span == max(addresses) + 1
    if len(set(addresses)) < len(addresses):
        assert value.overlaps
    assert value.size_bytes == 4 * min(max(addresses) + 1, len(addresses))


@given(st.permutations(range(4)), SHAPES.filter(lambda shape: len(shape) == 4), st.integers(0, 3))
def test_permuted_and_sliced_tensors_do_not_overlap(
    order: list[int], shape: list[int], cut: int
) -> None:
    tensor = torch.empty([n + cut for n in shape]).permute(order)
    part = tensor[tuple(slice(0, n) for n in shape)]
    assert not Value(tuple(part.shape), part.stride(), part.dtype, 0).overlaps


def test_expanded_tensors_overlap_and_are_packed_when_they_move() -> None:
    expanded = torch.empty(3, 1).expand(3, 5)
    value = Value(tuple(expanded.shape), expanded.stride(), expanded.dtype, 0)
    assert value.overlaps
    assert value.size_bytes == 12
