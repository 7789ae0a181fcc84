"""Random numbers for compiled loops: the state is one number, the same on every machine."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.compiled import compiled_borrowing

_STAR: Final = np.uint64(0x2545F4914F6CDD1D)
_A: Final = np.uint64(12)
_B: Final = np.uint64(25)
_C: Final = np.uint64(27)
_UNUSED_BITS: Final = np.uint64(11)
_STEP: Final = 2.0**-53


def seeded(seed: int) -> NDArray[np.uint64]:
    """Return a state (1,) for :func:`uniform`; different seeds give unrelated sequences."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)


@compiled_borrowing
def uniform(state: NDArray[np.uint64]) -> float:
    """Return the next number in 0 <= x < 1 (xorshift64*, Vigna: arXiv 1402.6246)."""
    x = state[0]
    x ^= x >> _A
    x ^= x << _B
    x ^= x >> _C
    state[0] = x
    return float((x * _STAR) >> _UNUSED_BITS) * _STEP


@compiled_borrowing
def below(state: NDArray[np.uint64], count: int) -> int:
    """Return an integer in 0 .. count - 1."""
    return int(uniform(state) * count)


@compiled_borrowing
def exponential(state: NDArray[np.uint64], mean: float) -> float:
    """Return a positive, exponentially distributed number."""
    return -float(np.log(1.0 - uniform(state))) * mean
