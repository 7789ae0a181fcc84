"""Tensors that a traced program would hold as constants although the step changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
from torch.ao.quantization.observer import MovingAveragePerChannelMinMaxObserver

from graphs.extract import ExtractionError, Workload, extract
from tests.helpers.tiny_models import Plain, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TRACED = pytest.mark.parametrize("extractor", ["export", "dispatch"])


def two_linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def refused(step: Workload, extractor: str, message: str) -> None:
    with pytest.raises(ExtractionError, match=message):
        extract(step, extractor)


def penalized(weights: Any) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return squared(output, target) + torch.stack([w.pow(2).sum() for w in weights]).sum()

    return loss


@TRACED
def test_parameters_that_a_loss_reads_from_a_list_are_no_constants(extractor: str) -> None:
    model = two_linear()
    step = Workload.of(model, (X, X), penalized(list(model.parameters())))
    refused(step, extractor, r"[01]\.\w+ is also read as a tensor of its own, from a list")


@TRACED
def test_parameters_that_a_module_reads_from_a_list_are_no_constants(extractor: str) -> None:
    layer = nn.Linear(8, 8)
    model = Plain(lambda m, x: m.layer(x) + sum(w.sum() for w in m.again), layer=layer)
    vars(model)["again"] = [layer.weight]
    refused(Workload.of(model, (X, X), squared), extractor, r"layer\.weight is also read")


@TRACED
def test_frozen_tensors_of_a_loss_are_constants(extractor: str) -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    step = Workload.of(two_linear(), (X, X), penalized(list(frozen.parameters())))
    assert extract(step, extractor).extractor == extractor


@pytest.mark.slow
def test_the_model_s_own_code_runs_such_steps() -> None:
    model = two_linear()
    step = Workload.of(model, (X, X), penalized(list(model.parameters())))
    assert extract(step).extractor == "modules"


@TRACED
def test_parameters_tied_by_their_data_are_not_placed_op_by_op(extractor: str) -> None:
    model = two_linear()
    model[1].weight.data = model[0].weight.data
    step = Workload.of(model, (X, X), squared)
    refused(step, extractor, r"1\.weight and 0\.weight overlap in memory")
    unchanged = Workload.of(model, (X,), training=False)
    assert extract(unchanged, extractor).extractor == extractor


@TRACED
@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_within_another_that_is_written_is_not_placed_op_by_op(
    extractor: str, training: bool
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.table[1] += x.mean()
        return m.layer(x) + m.row.sum()  # type: ignore[no-any-return]  # m is Any

    model = Plain(forward, layer=nn.Linear(8, 8))
    table = torch.zeros(3, 4)
    model.register_buffer("table", table)
    model.register_buffer("row", table[1])
    inputs, loss = ((X, X), squared) if training else ((X,), None)
    step = Workload.of(model, inputs, loss, training=training)
    refused(step, extractor, "row and table overlap|cannot be|takes an input of kind")


@pytest.mark.parametrize("contiguous", [True, False])
def test_parts_of_one_memory_that_do_not_overlap_are_placed(contiguous: bool) -> None:
    model = two_linear()
    memory = torch.randn(2, 8, 8) if contiguous else torch.randn(8, 8, 2).movedim(2, 0)
    for layer, own in zip(model, memory, strict=True):
        layer.weight.data = own
    assert extract(Workload.of(model, (X, X), squared)).extractor == "export"


@TRACED
def test_sparse_state_is_left_to_the_model_s_own_code(extractor: str) -> None:
    model = Plain(lambda m, x: torch.sparse.mm(m.near, m.layer(x)), layer=nn.Linear(8, 8))
    model.register_buffer("near", torch.eye(4).to_sparse())
    step = Workload.of(model, (X, X), squared)
    refused(step, extractor, "near has the layout torch.sparse_coo")
    found = extract(step)
    held = sum(node["parameter_bytes"] for node in found.graph.nodes.values())
    assert (found.extractor, held) == ("modules", 4 * (8 * 8 + 8 + 4))


def test_state_that_is_empty_until_the_model_has_run_is_refused() -> None:
    weights = FusedMovingAvgObsFakeQuantize(
        MovingAveragePerChannelMinMaxObserver, -128, 127, dtype=torch.qint8, ch_axis=0
    )

    def forward(m: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, m.fake(m.layer.weight))

    step = Workload.of(Plain(forward, layer=nn.Linear(8, 8), fake=weights), (X, X), squared)
    refused(step, "export", "is empty until the model has run: run the model once first")
    step.model(X)
    assert extract(step, "export").extractor == "export"
