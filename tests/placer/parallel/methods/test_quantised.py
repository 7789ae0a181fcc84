"""1-bit encoding: decoding returns the promised values, the optimal two per segment."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from placer.parallel.methods.onebit import Segments, decode, encode

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


def plain_row(row: Tensor, segment_of: Tensor) -> Tensor:
    """Encode and decode a row in plain Python, number by number."""
    decoded = torch.empty_like(row)
    for segment in set(segment_of.tolist()):
        for negative in (True, False):
            chosen = (segment_of == segment) & ((row < 0) == negative)
            if chosen.any():
                decoded[chosen] = row[chosen].mean()
    return decoded


@given(sizes=SIZES, stripes=st.integers(1, 4), seed=st.integers(0, 99))
def test_numbers_become_the_means_of_their_sign_in_their_segment(
    sizes: list[int], stripes: int, seed: int
) -> None:
    segments = Segments.of_sizes(sizes, stripes)
    rows = torch.randn(stripes, segments.length, generator=torch.Generator().manual_seed(seed))
    rows[rows.abs() < 0.1] = 0.0
    wire, sent = encode(rows, segments)
    assert wire.shape == (stripes, segments.length // 8 + 8 * segments.count)
    for row, of, decoded in zip(rows, segments.of, sent, strict=True):
        torch.testing.assert_close(decoded, plain_row(row, of))
    assert torch.equal(decode(wire, segments), sent)


@given(sizes=SIZES, stripes=st.integers(1, 4))
def test_segments_are_what_a_stripe_has_of_a_parameter(sizes: list[int], stripes: int) -> None:
    segments = Segments.of_sizes(sizes, stripes)
    assert segments.length % 8 == 0
    padded = [*sizes, segments.of.numel() - sum(sizes)]
    parameter = [number for number, size in enumerate(padded) for _ in range(size)]
    for stripe, of in enumerate(segments.of.tolist()):
        own = parameter[stripe * segments.length : (stripe + 1) * segments.length]
        assert list(dict.fromkeys(of)) == list(range(len(set(own))))
        assert [of[i] == of[i - 1] for i in range(1, len(of))] == [
            own[i] == own[i - 1] for i in range(1, len(own))
        ]
