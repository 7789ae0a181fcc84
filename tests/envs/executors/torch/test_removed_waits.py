"""Every wait, event and record of a stream is there for a reason: without it a test fails."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.overlapping import SCENARIOS
from tests.helpers.removed_waits import Site, killers, sites

torch.set_num_threads(1)
SEEDS = 6
SELECTION = [(name, work, seed) for name, work in SCENARIOS.items() for seed in range(SEEDS)]


@pytest.mark.slow
@pytest.mark.parametrize("site", sites(), ids=str)
def test_without_it_a_copy_goes_wrong(site: Site) -> None:
    assert killers(site, SELECTION), f"nothing fails without {site}"


def test_all_sites_are_found() -> None:
    found = [site.text for site in sites()]
    assert "stream.wait_stream(torch.cuda.current_stream(tensor.device))" in found
    assert "non_blocking=not waits" in found
