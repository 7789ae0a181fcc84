"""Every placer by its name: the contract, and how names are looked up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from placer.placers import placer_named
from placer.placers.contract import CHECKS, Make
from placer.placers.registry import OWN

NAMES = [listing.name for listing in OWN]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_placer_keeps_the_contract(name: str, check: Callable[[Make], None]) -> None:
    check(lambda: placer_named(name))
