"""Graphs of modules: units, order, co-location groups, and measured costs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from envs.costs.modules import profile_modules
from envs.hardware.cluster import Device
from graphs.extract import ExtractionError, Workload, extract
from graphs.extract.extraction import EXTRACTORS
from graphs.optimizer import Optimizer
from tests.helpers import tiny_models
from tests.helpers.tiny_models import Plain, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def linear_step(
    function: Callable[..., Any], training: bool = True, **modules: nn.Module
) -> Workload:
    torch.manual_seed(0)
    return Workload.of(Plain(function, linear=nn.Linear(8, 8), **modules), X, training=training)


def residual(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    out: Tensor = (y + m.second(F.relu(y))).sum()
    return out


def test_the_own_code_of_a_module_is_one_op_between_two_calls() -> None:
    graph = extract(linear_step(residual, second=nn.Linear(8, 8)), "modules").graph
    forward_ops = [op for op in graph if "backward/" not in op]
    assert forward_ops == ["linear:Linear", ":Plain", "second:Linear", ":Plain#1"]
    size = 4 * 4 * 8
    edges = {
        ("linear:Linear", ":Plain"): size,
        (":Plain", "second:Linear"): size,
        ("second:Linear", ":Plain#1"): size,
        ("linear:Linear", ":Plain#1"): size,
    }
    among = graph.subgraph(forward_ops)
    found = {edge: among.edges[edge]["bytes"] for edge in among.edges}
    assert found == edges
    back = {op: op.replace(":", ":backward/") for op in forward_ops}
    for (source, target), moved in edges.items():
        assert graph.edges[back[target], back[source]]["bytes"] == moved


def test_calls_that_share_parameters_or_state_stay_together() -> None:
    for name, together in (
        ("norm_twice", {"norm:BatchNorm1d", "norm@1:BatchNorm1d", "norm:backward/BatchNorm1d"}),
        ("tied_weights", {"embedding:Embedding", "head:Linear", "head:backward/Linear"}),
    ):
        nodes = extract(tiny_models.STEPS[name](), "modules").graph.nodes
        (group,) = {nodes[op]["colocate"] for op in together}
        assert group.startswith("state ")
        assert {op for op in nodes if nodes[op]["colocate"] == group} - together <= {
            *("norm@1:backward/BatchNorm1d", "embedding:backward/Embedding")
        }


class NumpyTanh(torch.autograd.Function):
    """Forward and backward computed outside of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.from_numpy(1 - np.tanh(x.numpy()) ** 2)


class Outside(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return NumpyTanh.apply(x)  # type: ignore[no-untyped-call]


def numpy_step() -> Workload:
    return linear_step(lambda m, x: m.linear(m.outside(m.linear(x))).sum(), outside=Outside())


def test_a_module_that_calls_numpy_is_placed_by_its_modules() -> None:
    extraction = extract(numpy_step())
    assert extraction.extractor == "modules"
    assert [tried.extractor for tried in extraction.fell_back] == ["export", "dispatch"]
    assert all(".numpy()" in tried.reason for tried in extraction.fell_back)
    assert list(nx.dag_longest_path(extraction.graph))[:4] == [
        *("linear:Linear", "outside:Outside", "linear@1:Linear", ":Plain")
    ]
    assert "outside:backward/Outside" in extraction.graph
    with pytest.raises(ExtractionError, match="no program"):
        extraction.check_any_data()


@pytest.mark.parametrize("make", [Tensor.to_sparse_coo, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_passed_on_between_modules(make: Callable[[Tensor], Tensor]) -> None:
    def glue(m: Any, x: Tensor) -> Tensor:
        pooled = make(m.linear(x).detach().relu())
        out: Tensor = m.second(pooled @ torch.ones(8, 8))
        return out

    graph = extract(linear_step(glue, second=nn.Linear(8, 8), training=False), "modules").graph
    assert list(nx.dag_longest_path(graph)) == ["linear:Linear", ":Plain", "second:Linear"]


def test_what_numpy_made_between_modules_comes_after_all_that_was_there() -> None:
    def glue(m: Any, x: Tensor) -> Tensor:
        first, second = m.linear(x), m.second(x)
        made = torch.from_numpy(np.abs(first.numpy()) + np.abs(second.numpy()))
        out: Tensor = m.third(made)
        return out

    step = linear_step(glue, training=False, second=nn.Linear(8, 8), third=nn.Linear(8, 8))
    graph = extract(step).graph
    assert nx.ancestors(graph, "third:Linear") >= {"linear:Linear", "second:Linear"}


def test_constants_that_a_module_reads_come_after_nothing() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.tril(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.mask

    branches = {"left": nn.Linear(4, 4), "masked": Masked()}
    model = Plain(lambda m, x: m.left(x) + m.masked(x), **branches)
    step = Workload.of(model, torch.ones(2, 4), training=False)
    graph = extract(step, "modules").graph
    trained = Workload.of(model, (torch.ones(2, 4), torch.ones(2, 4)), squared)
    kept = extract(trained, "modules").graph
    assert kept.nodes["masked:Masked"]["saved_bytes"] == 0
    [last] = [op_id for op_id in graph if not graph.out_degree(op_id)]
    assert graph.in_degree(last) == len(graph.edges) == 2
    assert [graph.edges[edge]["bytes"] for edge in graph.edges] == [32, 32]


def test_branches_in_threads_of_their_own_do_not_wait_for_each_other() -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as threads:
            left, right = threads.map(lambda module: module(x), (m.linear, m.second))
        out: Tensor = (left * right).sum()
        return out

    graph = extract(linear_step(both, second=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))).graph
    assert not nx.has_path(graph, "linear:Linear", "second.1:Tanh")
    assert not nx.has_path(graph, "second.0:Linear", "linear:Linear")
    assert nx.has_path(graph, "second.0:Linear", ":Plain")
    assert {"linear:backward/Linear", "second.1:backward/Tanh"} <= set(graph)


def test_modules_are_timed_in_both_directions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1024), nn.Linear(1024, 1024))
    x = torch.randn(64, 8)
    extraction = extract(Workload.of(model, (x, torch.zeros(64, 1024)), squared), "modules")
    core = min(os.sched_getaffinity(0))
    device = Device(name=f"core:{core}", kind="core", memory_bytes=1 << 30)
    before = os.sched_getaffinity(0)
    costs_s = profile_modules(extraction, [device], repeats=3)
    assert os.sched_getaffinity(0) == before
    assert costs_s.keys() == {"core"}
    of = dict(zip(extraction.graph, costs_s["core"].tolist(), strict=True))
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in of.values())
    assert of["2:Linear"] > of["0:Linear"]  # 16,384 times the FLOPs
    assert of["2:backward/Linear"] > of["0:backward/Linear"]


def test_modules_without_memory_cannot_be_timed() -> None:
    model = nn.Linear(8, 8, device="meta")
    extraction = extract(Workload.of(model, (X, X), squared), "modules")
    core = min(os.sched_getaffinity(0))
    device = Device(name=f"core:{core}", kind="core", memory_bytes=1 << 30)
    with pytest.raises(ExtractionError, match="cannot be timed"):
        profile_modules(extraction, [device])


def test_where_none_takes_it_all_three_say_why() -> None:
    step = replace(numpy_step(), optimizer=Optimizer(kind="sgd"))
    with pytest.raises(ExtractionError, match="no extractor takes Plain") as refused:
        extract(step)
    assert all(f" {name}: " in str(refused.value) for name in EXTRACTORS)
