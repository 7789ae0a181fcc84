"""Encoding rates: which payloads have one, and what is timed."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replicas.coding import CODINGS, coding_bytes_per_s
from envs.collectives import PAYLOADS
from placer.parallel.methods.onebit import Coder

SIZES = [40, 8, 300]


def test_every_payload_but_full_precision_has_a_rate() -> None:
    assert set(CODINGS) == set(PAYLOADS) - {"fp32"}
    assert coding_bytes_per_s("fp32", SIZES, 2) is None
    for name in CODINGS:
        rate = coding_bytes_per_s(name, SIZES, 2)
        assert rate is not None
        assert math.isfinite(rate)


def test_what_is_timed_is_a_mean_of_gradients() -> None:
    for name, coding in CODINGS.items():
        given_ones = torch.cat([torch.full((size,), float(size)) for size in SIZES])
        flat = given_ones.clone()
        coding(flat, SIZES, 1)()
        assert torch.equal(flat, given_ones), name


@given(seed=st.integers(0, 99), ranks=st.integers(1, 4))
def test_bits_and_what_they_leave_out_add_up(seed: int, ranks: int) -> None:
    random = torch.Generator().manual_seed(seed)
    gradients = torch.randn(ranks, sum(SIZES), generator=random)
    coders = [Coder.of_sizes(SIZES, ranks, rank) for rank in range(ranks)]
    wires = [coder.encoded(own) for coder, own in zip(coders, gradients, strict=True)]
    answers = [coder.answer(torch.stack([w[k] for w in wires])) for k, coder in enumerate(coders)]
    [mean, *others] = [coder.decoded(torch.cat(answers)) for coder in coders]
    assert all(torch.equal(mean, other) for other in others)
    left = torch.stack([coder.residual for coder in coders]).mean(0)
    left += torch.cat([coder.stripe for coder in coders])
    found = (mean + left.flatten())[: sum(SIZES)]
    torch.testing.assert_close(found, gradients.mean(0), rtol=1e-5, atol=1e-5)
