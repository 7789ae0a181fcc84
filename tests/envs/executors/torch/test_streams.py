"""Overlapping copies on fake CUDA devices, whose streams run as badly as CUDA allows."""

from __future__ import annotations

import pytest

from tests.helpers.overlapping import SCENARIOS

SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(6)]
"""The first run streams as late as possible and as early, the others in random orders."""


@pytest.mark.slow_repeats
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_copies_are_right_in_any_order_of_streams(name: str, seed: int) -> None:
    SCENARIOS[name](seed)
