"""Overlapping copies on fake CUDA devices, whose streams run as badly as CUDA allows."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.overlapping import SCENARIOS

torch.set_num_threads(1)
SEEDS = 6


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_copies_are_right_in_any_order_of_streams(name: str, seed: int) -> None:
    SCENARIOS[name](seed)
