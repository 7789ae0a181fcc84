"""Attributes of extracted graphs: FLOPs, bytes, edges, and co-location groups."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphs.extract import Extraction, Workload, extract
from graphs.extract.module_calls import Homes
from graphs.graph import attributes_of
from tests.helpers import tiny_models
from tests.helpers.tiny_models import Plain, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@functools.cache
def extracted(name: str) -> Extraction:
    return extract(tiny_models.STEPS[name]())


def linear_step(function: Callable[..., Any], *inputs: Any, training: bool = True) -> Workload:
    return Workload.of(Plain(function, linear=nn.Linear(8, 8)), inputs or X, training=training)


def groups_of(step: Workload) -> list[set[str]]:
    """Return the co-location groups of a step's ops."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for op_id, data in extract(step).graph.nodes(data=True):
        if data["colocate"] is not None:
            groups[data["colocate"]].add(op_id)
    return list(groups.values())


def test_an_unread_parameter_counts_with_the_first_op_of_the_nearest_module_around_it() -> None:
    homes = Homes([(0, "a.b"), (1, "a"), (2, "c.d"), (3, "c.d")])
    homed = {name: homes.of(name) for name in ("a.b.w", "a.w", "a.x.w", "c.d.e.w", "c.w", "w")}
    assert homed == {"a.b.w": 0, "a.w": 0, "a.x.w": 0, "c.d.e.w": 2, "c.w": 2, "w": 0}


def test_attention_counts_its_two_products() -> None:
    ops = {i: n["flops"] for i, n in extracted("attention").graph.nodes(data=True)}
    forward = 2 * 2 * (2 * 2 * 3 * 3 * 4)  # multiply-add, two products of 2 heads by 3 by 3 by 4
    by_phase = {True: 0, False: 0}
    for op, flops in ops.items():
        if "attention" in op:
            by_phase["backward" in op] += flops
    assert by_phase == {False: forward, True: 2.5 * forward}


def test_edges_carry_the_part_that_is_read_not_the_whole() -> None:
    graph = extract(linear_step(lambda m, x: (m.linear(x)[:, :3] * 2).sum())).graph
    assert graph.edges["linear:addmm", ":slice"]["bytes"] == 4 * 4 * 8
    assert graph.edges[":slice", ":mul"]["bytes"] == 4 * 4 * 3


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", ["conv_net", "norm_twice", "views"])
def test_a_backward_op_differentiates_an_op_of_its_module(name: str) -> None:
    extraction = extracted(name)
    modules = [module for _, module in extraction.graph.nodes(data="module")]
    pairs = [(op, of) for op, of in enumerate(extraction.forward_of) if of is not None]
    assert pairs
    assert all(modules[op] == modules[of] for op, of in pairs)


def test_the_backward_of_a_convolution_is_two_ops() -> None:
    graph = extracted("conv_net").graph
    input_part = "4:backward/convolution_backward.input"
    weight_part = "4:backward/convolution_backward.weight"
    assert {input_part, weight_part} <= set(graph)
    assert not graph.has_edge(input_part, weight_part)
    whole = attributes_of(graph, "4:convolution")["flops"]
    assert attributes_of(graph, input_part)["flops"] == whole
    assert attributes_of(graph, weight_part)["flops"] == whole
    assert "0:backward/convolution_backward" in graph  # its input needs no gradient


def lookups(_: Any, table: Tensor) -> tuple[Tensor, ...]:
    rows = torch.zeros(3, dtype=torch.int64)
    return F.embedding(rows, table), table.index_select(0, rows), table[rows]


LOOKED_UP = 8 * 3 + 4 * (3 * 8) + 4 * (3 * 8)
"""Indices, the rows of the table that are read, and the result."""


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("forward", "x", "expected"),
    [
        # What goes in and out is moved, a tensor that is read twice only once.
        (lambda _, x: (x + x) @ x, torch.zeros(10, 10), {"add": 800, "matmul": 1200}),
        # A lookup reads the rows that it returns, not the table.
        (
            lookups,
            torch.zeros(1000, 8),
            dict.fromkeys(("embedding", "index_select", "index"), LOOKED_UP),
        ),
        # Of a view only what it shows is read.
        (
            lambda _, x: (x[:2].exp(), x[:1].expand(50, 4).sin()),
            torch.zeros(10, 4),
            {"exp": 4 * (8 + 8), "sin": 4 * (4 + 200)},
        ),
        # Showing a part of a result moves nothing.
        (
            lambda _, x: x.exp()[:2].sin(),
            torch.zeros(10, 4),
            {"exp": 4 * (40 + 40), "slice": 0, "sin": 4 * (8 + 8)},
        ),
    ],
)
def test_moved_bytes_are_those_that_are_read_and_written(
    forward: Any, x: Tensor, expected: dict[str, int]
) -> None:
    graph = extract(Workload.of(Plain(forward), x, training=False)).graph
    moved = {node["op"]: node["moved_bytes"] for _, node in graph.nodes(data=True)}
    assert {op: moved[op] for op in expected} == expected


def halves() -> Workload:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = F.relu(m.a(x))[:, :3].sum() + F.relu(m.b(x))[:, 3:].sum()
        return out

    return Workload.of(Plain(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), X)


@pytest.mark.slow
def test_calls_that_share_a_parameter_or_buffer_and_parts_of_a_tensor_stay_together() -> None:
    norms = nn.Sequential(nn.Linear(8, 8), *[nn.BatchNorm1d(8)] * 3)
    twice = {f"norm{call}:_native_batch_norm_legit_functional" for call in ("", "@1")}
    assert any(twice <= ops for ops in groups_of(tiny_models.STEPS["norm_twice"]()))
    updates = groups_of(Workload.of(norms, (X, X), squared))
    assert any({"1:add", "2:add", "3:add"} <= ops for ops in updates)
    assert {"embedding:embedding", "head:mm"} in groups_of(tiny_models.tied_weights())
    parts = groups_of(halves())
    assert {":relu", ":slice"} in parts
    assert {":relu#1", ":slice#1"} in parts
    assert not groups_of(tiny_models.conv_net())
