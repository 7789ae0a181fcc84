"""Costs of reductions: calculated by hand, and properties of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.collectives import (
    ALGORITHMS,
    FLAT,
    PAYLOADS,
    Level,
    all_reduce,
    cheapest_all_reduce,
    double_tree_s,
    halving_doubling_s,
    hierarchical,
    recursive_doubling_s,
    ring_s,
    single_reducer_s,
    tree_s,
)
from tests.helpers.message_twin import PLAYED, hierarchy, is_reduction, seconds_of

GRADIENT_BYTES = 1.2e9


def all_reduce_s(
    algorithm: str, size_bytes: float, levels: Sequence[Level], *, payload_factor: float = 1.0
) -> float:
    return all_reduce(algorithm, size_bytes, levels, payload_factor=payload_factor).seconds


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


def test_a_single_reducer_takes_in_all_bytes_of_all_others() -> None:
    assert single_reducer_s(GRADIENT_BYTES, level(2)) == pytest.approx(1.2)
    assert single_reducer_s(GRADIENT_BYTES, level(10)) == pytest.approx(10.8)
    assert single_reducer_s(0, level(3, latency_s=0.5)) == 2.0  # two messages in each direction


def test_a_ring_sends_twice_all_bytes_but_one_part() -> None:
    assert ring_s(GRADIENT_BYTES, level(2)) == pytest.approx(1.2)
    assert ring_s(GRADIENT_BYTES, level(10)) == pytest.approx(2 * 9 / 10 * 1.2)
    assert ring_s(0, level(4, latency_s=0.5)) == 3.0  # 2 (4 - 1) messages


def test_a_tree_sends_all_bytes_at_every_step() -> None:
    assert tree_s(1e9, level(8, latency_s=0.5)) == 6 * 1.5  # three steps up, three down
    assert tree_s(1e9, level(5)) == 6.0


def test_halving_doubling_sends_the_bytes_of_a_ring_in_fewer_messages() -> None:
    assert halving_doubling_s(1e9, level(8)) == ring_s(1e9, level(8)) == 1.75
    assert halving_doubling_s(0, level(8, latency_s=0.5)) == 3.0
    # Two of six hand everything over first and receive it last: 1.5 s for four, plus 2 s.
    assert halving_doubling_s(1e9, level(6)) == 3.5


def test_recursive_doubling_sends_all_bytes_in_the_fewest_messages() -> None:
    assert recursive_doubling_s(1e9, level(8, latency_s=0.5)) == 3 * 1.5
    assert recursive_doubling_s(1e9, level(6, latency_s=0.5)) == 4 * 1.5  # two for four, plus two


def test_two_trees_cost_what_their_best_number_of_chunks_does() -> None:
    size, one = 1e8, level(100, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    best_s = min(2 * (2 * 7 + 2 * k) * (1e-5 + size / (2 * k) / 1e10) for k in range(1, 200))
    assert double_tree_s(size, one) <= best_s
    assert double_tree_s(size, one) == pytest.approx(best_s, rel=1e-3)
    assert double_tree_s(1e9, level(2)) == 2.0
    assert double_tree_s(1e6, level(1024, 1e-5, 1e10)) < ring_s(1e6, level(1024, 1e-5, 1e10))


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


@pytest.mark.parametrize(
    ("algorithm", "nodes", "megabytes", "measured_s", "share"),
    [
        ("ring", (1, 2), 8, 0.330, 0.1),
        ("ring", (1, 4), 16, 1.031, 0.1),
        ("ring", (1, 8), 8, 0.592, 0.1),
        ("ring", (2, 2), 8, 0.505, 0.1),
        ("ring", (4, 2), 8, 0.581, 0.1),
        ("hierarchical", (2, 2), 8, 0.371, 0.2),
        ("hierarchical", (4, 2), 8, 0.382, 0.2),
    ],
)
def test_reductions_took_as_long_on_an_emulated_network(
    algorithm: str, nodes: tuple[int, int], megabytes: int, measured_s: float, share: float
) -> None:
    """Times of gloo over links of 200 Mbit/s per host, best of three; (ranks of a host, hosts)."""
    inside, across = nodes
    network = [level(inside, bandwidth_bytes_per_s=1e10), level(across, 0.0, 200e6 / 8)]
    predicted_s = all_reduce_s(algorithm, megabytes * 1e6, network)
    assert predicted_s == pytest.approx(measured_s, rel=share)


def test_payloads_are_what_is_sent_of_a_byte() -> None:
    for name, bits in (("fp32", 32), ("fp16", 16), ("bf16", 16), ("1-bit", 1)):
        packed_s = all_reduce_s("ring", 32.0, [level(2)], payload_factor=PAYLOADS[name])
        assert packed_s == bits * 1e-9


def test_a_hierarchy_sends_only_its_part_to_other_nodes() -> None:
    inside, across = level(4, bandwidth_bytes_per_s=1e10), level(2)
    # 1.5 x 1 GB at 10 GB/s; then each of four has 0.25 GB and a quarter of 1 GB/s.
    assert hierarchical(1e9, [inside, across]).seconds == pytest.approx(0.15 + 1.0)
    assert all_reduce_s("ring", 1e9, [inside, across]) == pytest.approx(1.75)
    # A rack of eight ranks: each holds an eighth, and all share its port.
    rack = level(3, bandwidth_bytes_per_s=5e8)
    assert hierarchical(1e9, [inside, across, rack]).seconds == pytest.approx(1.15 + 4 / 3 * 2)


def test_flat_halving_doubling_shares_the_ports_of_nodes() -> None:
    inside, across = level(4, bandwidth_bytes_per_s=1e10), level(2)
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


@given(size=SIZES, name=st.sampled_from(sorted(FLAT)), one=LEVELS)
def test_one_rank_has_nothing_to_send(size: int, name: str, one: list[Level]) -> None:
    alone = level(1, one[0].latency_s, one[0].bandwidth_bytes_per_s)
    assert all_reduce_s(name, size, [alone]) == 0.0
    assert hierarchical(size, [alone, alone]).seconds == 0.0


@given(size=SIZES, ranks=st.integers(2, 40), bandwidth=st.floats(1e6, 1e12))
def test_no_algorithm_sends_less_than_a_ring(size: int, ranks: int, bandwidth: float) -> None:
    least_s = 2 * (ranks - 1) / ranks * size / bandwidth
    for name in ALGORITHMS:
        seconds = all_reduce_s(name, size, [level(ranks, 0.0, bandwidth)])
        assert seconds >= least_s * (1 - 1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("star", 1.0, [level(2)]), "no reduction 'star': there are ring, tree"),
        (("ring", 1.0, []), "at least one level"),
        (("ring", -1.0, [level(2)]), "size_bytes is -1.0"),
        (("ring", math.nan, [level(2)]), "size_bytes is nan"),
    ],
)
def test_what_is_no_reduction_is_refused(
    arguments: tuple[str, float, list[Level]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce_s(*arguments)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="payload_factor is 0"):
        all_reduce_s("ring", 1.0, [level(2)], payload_factor=0)
    with pytest.raises(ValueError, match="0 ranks"):
        level(0)
    with pytest.raises(ValueError, match="0 ports"):
        Level(ranks=2, latency_s=0.0, bandwidth_bytes_per_s=1e9, ports=0)
    with pytest.raises(ValueError, match="latency_s is nan"):
        level(2, latency_s=math.nan)
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s is 0"):
        level(2, bandwidth_bytes_per_s=0)
