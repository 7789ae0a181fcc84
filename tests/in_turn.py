"""Parameters of a test, those that take long marked as slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

import pytest

LARGE: Final = frozenset(
    {
        *("bert", "bert-squad", "distilbert", "inception", "llama", "mixtral", "nasnet", "nmt"),
        *("resnet", "rnnlm", "roberta", "separate_moe", "t5", "vit", "whisper"),
    }
)
"""Models that take more than about half a second to extract. What every model must do is tested
with the others first; with these it is a slow test."""


def in_turn(names: Iterable[str], *, slow: Collection[str] = LARGE) -> list[Any]:
    """Return every name as a parameter; slow ones run with the slow tests."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]
