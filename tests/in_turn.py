"""Parameters of a test, those that take long marked as slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_turn(names: Iterable[str], *, slow: Collection[str]) -> list[Any]:
    """Every name as a parameter; slow ones run with the slow tests."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]
