"""Reductions executed message by message on real numbers: slow, but plainly correct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import prod
from typing import TypeAlias

import numpy as np

from envs.collectives import Level


@dataclass(frozen=True)
class Message:
    source: int
    target: int
    chunks: tuple[int, ...]
    adds: bool  # to the target's value, instead of replacing it


Round: TypeAlias = list[Message]
"""Concurrent messages; they all send the values from before the round."""


def ring(ranks: Sequence[int], chunks: Sequence[Sequence[int]]) -> tuple[list[Round], list[Round]]:
    """Return the rounds of reduce-scatter and all-gather; between them rank i holds part i + 1."""
    p = len(ranks)

    def step(t: int, adds: bool) -> Round:
        first = 0 if adds else 1
        return [
            Message(ranks[i], ranks[(i + 1) % p], tuple(chunks[(i + first - t) % p]), adds)
            for i in range(p)
        ]

    return [step(t, True) for t in range(p - 1)], [step(t, False) for t in range(p - 1)]


def flat_ring(p: int) -> list[Round]:
    scatter, gather = ring(range(p), [[i] for i in range(p)])
    return scatter + gather


def halving_doubling(p: int) -> list[Round]:
    every = tuple(range(p))
    power = 1 << (p.bit_length() - 1)
    before, after = _folded(p, power, every)
    parts = np.array_split(np.arange(p), power)  # equal sizes for a power of two
    halving: list[Round] = []
    doubling: list[Round] = []
    held = dict.fromkeys(range(power), (0, power))
    distance = power // 2
    while distance:
        down: Round = []
        up: Round = []
        for r, (low, high) in list(held.items()):
            middle = (low + high) // 2
            own, other = ((low, middle), (middle, high))[:: -1 if r & distance else 1]
            down.append(Message(r, r ^ distance, _chunks(parts, other), True))
            up.append(Message(r, r ^ distance, _chunks(parts, own), False))
            held[r] = own
        halving.append(down)
        doubling.insert(0, up)
        distance //= 2
    return before + halving + doubling + after


def recursive_doubling(p: int) -> list[Round]:
    every = tuple(range(p))
    power = 1 << (p.bit_length() - 1)
    before, after = _folded(p, power, every)
    steps = [1 << k for k in range(power.bit_length() - 1)]
    return [
        *before,
        *([Message(r, r ^ step, every, True) for r in range(power)] for step in steps),
        *after,
    ]


def tree(p: int) -> list[Round]:
    every = tuple(range(p))
    steps = [1 << k for k in range((p - 1).bit_length())]
    up = [[Message(r, r - step, every, True) for r in range(step, p, 2 * step)] for step in steps]
    down = [[Message(m.target, m.source, every, False) for m in one] for one in reversed(up)]
    return up + down


def hierarchy(sizes: Sequence[int]) -> list[Round]:
    """Return rings at every level: reduce-scatters from the innermost out, all-gathers back."""
    count = prod(sizes)
    held = {r: list(range(count)) for r in range(count)}
    scatters: list[Round] = []
    gathers: list[Round] = []
    inside = 1
    for p in sizes:
        scattered: list[list[Round]] = []
        gathered: list[list[Round]] = []
        for first in (r for r in range(count) if r // inside % p == 0):
            ranks = [first + i * inside for i in range(p)]
            parts = [list(part) for part in np.array_split(held[first], p)]
            scatter, gather = ring(ranks, parts)
            scattered.append(scatter)
            gathered.append(gather)
            for i, rank in enumerate(ranks):
                held[rank] = parts[(i + 1) % p]
        scatters += _together(scattered)
        gathers = _together(gathered) + gathers
        inside *= p
    return scatters + gathers


PLAYED: dict[str, Callable[[int], list[Round]]] = {
    "ring": flat_ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "recursive-doubling": recursive_doubling,
}


def is_reduction(rounds: list[Round], ranks: int) -> bool:
    """Return whether every rank ends with the sum of all ranks in every chunk."""
    values = np.array([[7**r % 1009 + 10_000 * c for c in range(ranks)] for r in range(ranks)])
    expected = values.sum(axis=0)
    for one in rounds:
        sent = [values[m.source, list(m.chunks)] for m in one]
        for m, chunk in zip(one, sent, strict=True):
            values[m.target, list(m.chunks)] = chunk + (
                values[m.target, list(m.chunks)] if m.adds else 0
            )
    return bool((values == expected).all())


def seconds_of(rounds: list[Round], size_bytes: float, levels: Sequence[Level]) -> float:
    """Return the seconds of all rounds, each as long as its busiest port."""
    ranks = prod(level.ranks for level in levels)
    total_s = 0.0
    for one in rounds:
        passed: Counter[tuple[str, int, int]] = Counter()
        for m in one:
            at, inside = _crossing(m, levels)
            chunks = len(m.chunks)
            passed["out", at, m.source // inside] += chunks
            passed["in", at, m.target // inside] += chunks
        total_s += max(
            levels[at].latency_s
            + chunks * size_bytes / ranks / levels[at].bandwidth_bytes_per_s / levels[at].ports
            for (_, at, _), chunks in passed.items()
        )
    return total_s


def _crossing(message: Message, levels: Sequence[Level]) -> tuple[int, int]:
    """Return the outermost level where two ranks differ, and the ranks that share a port there."""
    inside = prod(level.ranks for level in levels)
    for at in range(len(levels) - 1, -1, -1):
        inside //= levels[at].ranks
        if message.source // inside != message.target // inside:
            return at, inside
    raise AssertionError("a rank sends nothing to itself")


def _folded(p: int, power: int, every: tuple[int, ...]) -> tuple[list[Round], list[Round]]:
    """Return the messages of the ranks beyond a power of two, before and after the main rounds."""
    if p == power:
        return [], []
    beyond = range(power, p)
    return (
        [[Message(r, r - power, every, True) for r in beyond]],
        [[Message(r - power, r, every, False) for r in beyond]],
    )


def _chunks(parts: Sequence[np.ndarray], which: tuple[int, int]) -> tuple[int, ...]:
    return tuple(np.concatenate(parts[slice(*which)]).tolist())


def _together(several: list[list[Round]]) -> list[Round]:
    return [list(chain(*rounds)) for rounds in zip_longest(*several, fillvalue=[])]
