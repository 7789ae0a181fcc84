"""Parameters of tests that go through all models; large models are slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

import pytest

LARGE: Final = frozenset(
    {
        *("bert", "bert-squad", "distilbert", "gpt2", "inception", "llama", "mixtral", "nasnet"),
        *("nmt", "resnet", "rnnlm", "roberta", "separate_moe", "t5", "vit", "whisper"),
    }
)
"""Models that take more than half a second to extract: slow tests where ``in_turn`` is used."""


def in_turn(names: Iterable[str], *, slow: Collection[str] = LARGE) -> list[Any]:
    """Return every name as a parameter; those in ``slow`` are marked as slow tests."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]
