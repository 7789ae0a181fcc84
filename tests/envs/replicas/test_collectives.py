"""Costs of reductions: calculated by hand, and properties of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import prod
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.collectives import (
    ALGORITHMS,
    Level,
    MeasuredAllReduce,
    all_reduce,
    cheapest_all_reduce,
    double_tree_s,
    halving_doubling_s,
    hierarchical,
    ring_s,
    single_reducer_s,
)
from envs.replication import Replication


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


def level(ranks: int, latency_s: float = 0.0, bandwidth_bytes_per_s: float = 1e9) -> Level:
    return Level(ranks=ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)


LEVELS = st.lists(
    st.builds(
        Level,
        ranks=st.integers(1, 9),
        latency_s=st.floats(0, 1e-3),
        bandwidth_bytes_per_s=st.floats(1e6, 1e12),
    ),
    min_size=1,
    max_size=4,
)
SIZES = st.integers(0, 10**10)


def all_reduce_s(algorithm: str, size_bytes: float, levels: Sequence[Level]) -> float:
    return all_reduce(algorithm, size_bytes, levels).seconds


def test_a_single_reducer_takes_in_all_bytes_of_all_others() -> None:
    assert single_reducer_s(1.2e9, level(10)) == pytest.approx(10.8)
    assert single_reducer_s(0, level(3, latency_s=0.5)) == 2.0  # two messages in each direction


def test_two_trees_cost_what_their_best_number_of_chunks_does() -> None:
    size, one = 1e8, level(100, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    best_s = min(2 * (2 * 7 + 2 * k) * (1e-5 + size / (2 * k) / 1e10) for k in range(1, 200))
    assert double_tree_s(size, one) <= best_s
    assert double_tree_s(size, one) == pytest.approx(best_s, rel=1e-3)
    assert double_tree_s(1e9, level(2)) == 2.0
    assert double_tree_s(1e9, level(1, latency_s=1.0)) == 0.0


@given(size=SIZES, one=LEVELS.map(lambda levels: levels[0]), name=st.sampled_from(sorted(PLAYED)))
def test_a_flat_reduction_takes_what_its_messages_take(size: int, one: Level, name: str) -> None:
    rounds = PLAYED[name](one.ranks)
    assert is_reduction(rounds, one.ranks)
    if one.ranks & (one.ranks - 1) and name == "halving-doubling":
        return  # its parts are not whole chunks; see the next test
    played_s = seconds_of(rounds, size, [one])
    assert all_reduce_s(name, size, [one]) == pytest.approx(played_s, rel=1e-9)


@pytest.mark.parametrize("ranks", [3, 6, 12, 20])
def test_ranks_beyond_a_power_of_two_send_everything_twice(ranks: int) -> None:
    power = 1 << (ranks.bit_length() - 1)
    assert is_reduction(PLAYED["halving-doubling"](ranks), ranks)
    # The twin's chunks are thirds etc.; for a power of two they are whole parts.
    inner_s = seconds_of(PLAYED["halving-doubling"](power), 1e9, [level(power, 0.5)])
    assert halving_doubling_s(1e9, level(ranks, 0.5)) == pytest.approx(inner_s + 2 * 1.5)


@pytest.mark.slow
@given(levels=LEVELS.map(lambda levels: levels[:3]), size=SIZES, latency_s=st.floats(0, 1e-3))
def test_a_flat_ring_over_nodes_takes_what_its_messages_take(
    levels: list[Level], size: int, latency_s: float
) -> None:
    alike = [level(min(x.ranks, 4), latency_s, x.bandwidth_bytes_per_s) for x in levels]
    played_s = seconds_of(PLAYED["ring"](math.prod(x.ranks for x in alike)), size, alike)
    assert all_reduce_s("ring", size, alike) == pytest.approx(played_s, rel=1e-9)


@given(levels=LEVELS.map(lambda levels: levels[:3]), size=SIZES)
def test_a_hierarchy_takes_what_its_messages_take(levels: list[Level], size: int) -> None:
    free = [level(min(x.ranks, 4), 0.0, x.bandwidth_bytes_per_s) for x in levels]
    sizes = [x.ranks for x in free]
    rounds = hierarchy(sizes)
    assert is_reduction(rounds, math.prod(sizes))
    assert hierarchical(size, free).seconds == pytest.approx(
        seconds_of(rounds, size, free), rel=1e-9
    )


def test_a_hierarchy_chooses_by_level_and_says_what() -> None:
    inside = level(8, latency_s=1e-6, bandwidth_bytes_per_s=1e11)
    across = level(512, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    small, large = hierarchical(1e3, [inside, across]), hierarchical(1e10, [inside, across])
    assert small.by_level == ("halving-doubling", "recursive-doubling")
    assert large.by_level == ("halving-doubling", "halving-doubling")
    three = level(3, latency_s=1e-6, bandwidth_bytes_per_s=1e11)
    assert hierarchical(1e3, [three, across]).by_level == ("ring", "recursive-doubling")
    assert all_reduce("tree", 1e3, [inside, across]).by_level == ()


def test_inside_the_outermost_level_every_rank_gets_an_equal_part() -> None:
    # Three ranks cannot halve: one of them would be left without a part.
    inside = level(3, latency_s=1.0)
    found = hierarchical(9e3, [inside, level(2)])
    assert found.by_level[0] == "ring"
    assert found.seconds == pytest.approx(ring_s(9e3, inside) + ring_s(3e3, level(2, 0.0, 1e9 / 3)))


def test_a_node_with_a_port_for_each_device_does_not_share_one() -> None:
    inside, across = level(4, bandwidth_bytes_per_s=1e10), level(2)
    own = Level(ranks=2, latency_s=0.0, bandwidth_bytes_per_s=1e9, ports=4)
    assert hierarchical(1e9, [inside, own]).seconds == pytest.approx(0.15 + 0.25)
    assert all_reduce_s("halving-doubling", 1e9, [inside, own]) == pytest.approx(1.75)
    assert all_reduce_s("ring", 1e9, [inside, own]) == all_reduce_s("ring", 1e9, [inside, across])
    assert all_reduce_s("halving-doubling", 1e9, [inside, across]) == pytest.approx(1.75 * 4)


def test_the_cheapest_is_chosen_by_size() -> None:
    network = [level(16, latency_s=1e-5, bandwidth_bytes_per_s=1e10)]
    small, large = cheapest_all_reduce(8, network), cheapest_all_reduce(1e9, network)
    assert small.algorithm == "recursive-doubling"
    assert large.seconds == pytest.approx(2 * 15 / 16 * 0.1, rel=1e-2)
    nodes = [level(8, bandwidth_bytes_per_s=1e11), level(4, bandwidth_bytes_per_s=1e9)]
    assert cheapest_all_reduce(1e9, nodes).algorithm == "hierarchical"


@given(size=SIZES, levels=LEVELS, more=st.floats(1, 10), name=st.sampled_from(ALGORITHMS))
def test_more_bytes_or_latency_or_less_bandwidth_is_never_faster(
    size: int, levels: list[Level], more: float, name: str
) -> None:
    slower = [
        Level(
            ranks=one.ranks,
            latency_s=one.latency_s * more,
            bandwidth_bytes_per_s=one.bandwidth_bytes_per_s / more,
        )
        for one in levels
    ]
    now_s = all_reduce_s(name, size, levels) * (1 - 1e-12)
    assert all_reduce_s(name, size * more, levels) >= now_s
    assert all_reduce_s(name, size, slower) >= now_s


@pytest.mark.parametrize(
    ("field", "value"),
    [("ranks", 0), ("ports", 0), ("latency_s", math.nan), ("bandwidth_bytes_per_s", 0)],
)
def test_a_level_out_of_range_is_refused(field: str, value: float) -> None:
    valid: dict[str, Any] = {"ranks": 2, "latency_s": 0.0, "bandwidth_bytes_per_s": 1e9, "ports": 1}
    with pytest.raises(ValueError, match=field):
        Level(**{**valid, field: value})


TIMES = ((2, 100, 1.0), (2, 300, 2.0), (4, 100, 3.0), (4, 200, 5.0))


@pytest.mark.parametrize(
    ("size_bytes", "ranks", "seconds"),
    [
        *((5, 1, 0.0), (5, 2, 1.0), (100, 2, 1.0), (200, 2, 1.5), (300, 2, 2.0), (500, 2, 3.0)),
        *((100, 3, 3.0), (150, 4, 4.0)),
        (100, 8, 3.0 * (7 / 8) / (3 / 4)),  # a ring of 8 sends 7/8 of the bytes twice, one of 4 3/4
    ],
)
def test_measured_times_are_linear_between_sizes(
    size_bytes: int, ranks: int, seconds: float
) -> None:
    assert MeasuredAllReduce("gloo", TIMES).seconds(size_bytes, ranks) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "times",
    [(), TIMES[:1], TIMES[::-1], TIMES[:3], ((1, 1, 1.0), (1, 2, 1.0)), ((2, 1, 0.0), (2, 2, 1.0)),
     ((2, 1, 1.0), (2, 1, 2.0))],
)  # fmt: skip
def test_measured_times_are_checked(times: tuple[tuple[int, int, float], ...]) -> None:
    with pytest.raises(ValueError, match="measured all-reduces"):
        MeasuredAllReduce("gloo", times)


def test_hierarchical_all_reduces_take_the_times_of_their_levels() -> None:
    by_level = (((2, 2), 1000, 4e-3), ((2, 2), 2000, 6e-3))
    measured = MeasuredAllReduce("gloo", TIMES, by_level)
    two = Level(ranks=2, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    one, three = replace(two, ranks=1), replace(two, ranks=3)
    assert measured.hierarchical_s(1500, [two, one, two]) == pytest.approx(5e-3)
    assert measured.hierarchical_s(1500, [two, one]) == measured.seconds(1500, 2)
    assert measured.hierarchical_s(1500, []) == 0.0
    assert measured.hierarchical_s(1500, [two, three]) is None
    wanted = Replication(reduction="hierarchical")
    known = wanted.all_reduce(1500, [two, two], measured)
    assert known.algorithm == "hierarchical"
    assert known.seconds == pytest.approx(5e-3)
    assert wanted.all_reduce(1500, [two, three], measured) == hierarchical(1500, [two, three])
    tree = Replication(reduction="tree").all_reduce(1500, [two], measured)
    assert tree == all_reduce("tree", 1500, [two])


@pytest.mark.parametrize(
    "by_level",
    [(((2, 2), 1, 1.0),), (((2, 1), 1, 1.0), ((2, 1), 2, 1.0)),
     (((2, 2), 2, 1.0), ((2, 2), 1, 1.0)), (((2, 2), 1, 1.0), ((2, 2), 2, 0.0))],
)  # fmt: skip
def test_times_by_level_are_checked(
    by_level: tuple[tuple[tuple[int, ...], int, float], ...],
) -> None:
    with pytest.raises(ValueError, match="measured all-reduces"):
        MeasuredAllReduce("gloo", TIMES, by_level)
