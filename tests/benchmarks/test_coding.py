"""Encoding rates: which payloads have one, and what is timed."""

from __future__ import annotations

import math

import torch

from benchmarks.replicas.coding import CODINGS, coding_bytes_per_s
from envs.collectives import PAYLOADS

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
