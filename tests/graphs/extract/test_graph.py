"""Attributes of extracted graphs: FLOPs, bytes, edges, and co-location groups."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphs.extract import Extraction, Workload, extract
from graphs.extract.module_calls import Homes
from graphs.graph import attributes_of
from tests.helpers import tiny_models
from tests.helpers.tiny_models import Plain, squared

torch.set_num_threads(1)

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@functools.cache
def extracted(name: str) -> Extraction:
    return extract(tiny_models.STEPS[name]())


def linear_step(function: Callable[..., Any], *inputs: Any, training: bool = True) -> Workload:
    return Workload.of(Plain(function, linear=nn.Linear(8, 8)), inputs or X, training=training)


def groups_of(graph: nx.DiGraph[str]) -> dict[str, set[str]]:
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for op_id in graph:
        group = attributes_of(graph, op_id)["colocate"]
        if group is not None:
            groups[group].add(op_id)
    return dict(groups)


def test_an_unread_parameter_counts_with_the_first_op_of_the_nearest_module_around_it() -> None:
    homes = Homes([(0, "a.b"), (1, "a"), (2, "c.d"), (3, "c.d")])
    homed = {name: homes.of(name) for name in ("a.b.w", "a.w", "a.x.w", "c.d.e.w", "c.w", "w")}
    assert homed == {"a.b.w": 0, "a.w": 0, "a.x.w": 0, "c.d.e.w": 2, "c.w": 2, "w": 0}


@pytest.mark.parametrize("training", [True, False])
def test_attention_counts_its_two_products(training: bool) -> None:
    step = tiny_models.attention()
    step = Workload(step.model, step.inputs, step.keywords, step.loss, training)
    graph = extract(step).graph
    ops = {i: n["flops"] for i, n in graph.nodes(data=True) if "attention" in n["op"]}
    forward = 2 * 2 * (2 * 2 * 3 * 3 * 4)  # multiply-add, two products of 2 heads by 3 by 3 by 4
    assert sum(f for i, f in ops.items() if "backward" not in i) == forward
    assert sum(f for i, f in ops.items() if "backward" in i) == (2.5 * forward if training else 0)


def test_edges_carry_the_part_that_is_read_not_the_whole() -> None:
    graph = extract(linear_step(lambda m, x: (m.linear(x)[:, :3] * 2).sum())).graph
    assert graph.edges["linear:addmm", ":slice"]["bytes"] == 4 * 4 * 8
    assert graph.edges[":slice", ":mul"]["bytes"] == 4 * 4 * 3


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


def moved(forward: Any, *inputs: Tensor) -> dict[str, int]:
    """Return {op: moved bytes} of an inference step."""
    extraction = extract(Workload.of(Plain(forward), inputs, training=False))
    return {node["op"]: node["moved_bytes"] for _, node in extraction.graph.nodes(data=True)}


def test_what_goes_in_and_what_comes_out_is_moved_and_a_tensor_read_twice_only_once() -> None:
    found = moved(lambda _, x: (x + x) @ x, torch.zeros(10, 10))
    assert found == {"add": 4 * (100 + 100), "matmul": 4 * (100 + 100 + 100)}


def test_a_lookup_reads_the_rows_that_it_gives_out_not_the_table() -> None:
    def lookups(_: Any, table: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        looked_up = torch.nn.functional.embedding(rows, table)
        return looked_up, table.index_select(0, rows), table[rows]

    found = moved(lookups, torch.zeros(1000, 8), torch.zeros(3, dtype=torch.int64))
    by_hand = 8 * 3 + 4 * (3 * 8) + 4 * (3 * 8)
    assert found == {"embedding": by_hand, "index_select": by_hand, "index": by_hand}


def test_of_a_view_only_what_it_shows_is_read() -> None:
    found = moved(lambda _, x: (x[:2].exp(), x[:1].expand(50, 4).sin()), torch.zeros(10, 4))
    assert found == {"exp": 4 * (8 + 8), "sin": 4 * (4 + 200)}


def test_showing_a_part_of_what_was_computed_moves_nothing() -> None:
    found = moved(lambda _, x: x.exp()[:2].sin(), torch.zeros(10, 4))
    assert found == {"exp": 4 * (40 + 40), "slice": 0, "sin": 4 * (8 + 8)}


def test_a_batch_norm_called_twice_keeps_its_calls_together() -> None:
    groups = groups_of(extracted("norm_twice").graph)
    together = {
        "norm:_native_batch_norm_legit_functional",
        "norm@1:_native_batch_norm_legit_functional",
    }
    assert any(together <= ops for ops in groups.values())


def test_all_calls_between_the_first_and_the_last_update_of_a_buffer_stay_together() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *[nn.BatchNorm1d(8)] * 3)
    groups = groups_of(extract(Workload.of(model, (X, X), squared)).graph)
    assert any({"1:add", "2:add", "3:add"} <= ops for ops in groups.values())


def test_readers_of_a_tied_parameter_stay_together() -> None:
    groups = groups_of(extracted("tied_weights").graph)
    assert {"embedding:embedding", "head:mm"} in groups.values()


def test_parts_stay_with_their_tensor_and_apart_from_those_of_others() -> None:
    step = Workload.of(
        Plain(
            lambda m, x: F.relu(m.a(x))[:, :3].sum() + F.relu(m.b(x))[:, 3:].sum(),
            a=nn.Linear(8, 8),
            b=nn.Linear(8, 8),
        ),
        X,
    )
    groups = groups_of(extract(step).graph)
    assert {":relu", ":slice"} in groups.values()
    assert {":relu#1", ":slice#1"} in groups.values()


def test_a_plain_chain_has_no_groups() -> None:
    assert not groups_of(extracted("conv_net").graph)
