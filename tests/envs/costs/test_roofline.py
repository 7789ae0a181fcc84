"""The roofline: by hand, its properties, and the rates that a described device needs."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from envs.costs.roofline import check_rates, roofline_costs, roofline_s
from envs.hardware.cluster import Cluster, Device
from envs.problem import Problem
from graphs.costs import with_costs
from graphs.graph import GraphArrays, add_op, new_graph

GPU = Device(
    name="gpu:0",
    kind="gpu",
    memory_bytes=1 << 40,
    launch_s=5e-6,
    peak_flop_per_s=1e12,
    bandwidth_bytes_per_s=1e9,
)


def without(*names: str) -> Device:
    known = {field.name: getattr(GPU, field.name) for field in fields(GPU)}
    return Device(**known | dict.fromkeys(names, math.nan))


def seconds(flops: int, moved_bytes: int, device: Device = GPU) -> float:
    (found,) = roofline_s(np.array([flops]), np.array([moved_bytes]), device).tolist()
    return float(found)


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "expected_s"),
    [
        (2 * 10**9, 10**6, 2e-3),  # arithmetic 2 ms, traffic 1 ms
        (2 * 10**9, 3 * 10**6, 3e-3),
        (0, 500, 5e-7),
        (0, 0, 0.0),
    ],
)
def test_by_hand(flops: int, moved_bytes: int, expected_s: float) -> None:
    assert seconds(flops, moved_bytes) == pytest.approx(expected_s)


def test_the_launch_is_added_once_by_the_problem() -> None:
    graph = new_graph("one op")
    add_op(graph, "a", cost_s={}, flops=2 * 10**9, moved_bytes=10**6)
    costs_s = roofline_costs(graph, [GPU])
    costed = GraphArrays.from_graph(with_costs(graph, costs_s, {"gpu": "roofline"}))
    problem = Problem.of(costed, Cluster(name="one", devices=(GPU,)))
    assert problem.cost_ns.tolist() == [[2_000_000 + 5_000]]


@pytest.mark.parametrize("lacking", ["peak_flop_per_s", "bandwidth_bytes_per_s"])
def test_a_device_without_rates_is_refused_with_what_to_add(lacking: str) -> None:
    with pytest.raises(ValueError, match="'gpu:0'") as refusal:
        check_rates([without(lacking)])
    for name in ("peak_flop_per_s", "bandwidth_bytes_per_s"):
        assert (f"{name} = " in str(refusal.value)) == (name == lacking)


def test_devices_of_one_kind_must_have_the_same_rates() -> None:
    other = replace(GPU, name="gpu:1", peak_flop_per_s=2e12)
    with pytest.raises(ValueError, match="'gpu:0' and 'gpu:1'"):
        check_rates([GPU, other])
    check_rates([GPU, replace(other, kind="other"), replace(GPU, name="gpu:2")])
