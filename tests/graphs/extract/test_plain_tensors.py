"""Tensors that a model holds as plain attributes are constants of an exported training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.extract import ExtractionError, Workload, extract
from tests.helpers import one_process
from tests.helpers.placed_steps import by_calls
from tests.helpers.tiny_models import Plain, squared
from tests.helpers.trained_alike import assert_trains_alike

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def step_of(function: Callable[[Any, Tensor], Any]) -> Workload:
    torch.manual_seed(0)
    model = Plain(function, linear=nn.Linear(8, 8), inner=nn.Tanh())
    table = torch.randn(1, 8)
    model.table = model.get_submodule("inner").table = table
    model.bias = model.get_parameter("linear.bias").detach()
    return Workload.of(model, (X, X.flip(0)), squared)


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "itself": lambda m, x: m.linear(x) + m.table,
    "cloned": lambda m, x: m.linear(x) + m.table.type_as(x).to(x.device).clone().detach(),
    "detached": lambda m, x: m.linear(x) + m.table.detach().clone(),
    "expanded": lambda m, x: m.linear(x) * m.table.expand(len(x), -1),
    "typed": lambda m, x: m.linear(x) * m.table.double().float(),
    "shared": lambda m, x: m.linear(x + m.table) * m.inner.table,
    "beside a literal": lambda m, x: m.linear(x) * m.table + torch.tensor([0.5]),
}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", READS)
def test_what_reads_a_plain_tensor_is_exported(name: str) -> None:
    step = step_of(READS[name])
    extraction = extract(step)
    assert extraction.fell_back == ()
    assert "model.table" in {s.name for s in extraction.program.sources if s.role == "constant"}
    one_process.assert_runs_as_eager(extraction, exact=True)
    assert_trains_alike(copy.deepcopy(step), by_calls(extraction, ["cpu"]), tolerance=1e-9)


def test_inference_in_mixed_precision_reads_it_too() -> None:
    step = replace(step_of(READS["itself"]), training=False, loss=None, inputs=(X,), dtype="bf16")
    extraction = extract(step)
    assert extraction.fell_back == ()
    one_process.assert_runs_as_eager(extraction, exact=True)


def test_its_values_may_not_change_afterwards() -> None:
    step = step_of(READS["itself"])
    extraction = extract(step)
    extraction.check_constants()
    step.model.table.add_(1)  # type: ignore[operator]
    with pytest.raises(ValueError, match="table of Plain has changed"):
        extraction.check_constants()


def test_nor_may_those_of_a_parameter_that_it_shows() -> None:
    step = step_of(lambda m, x: m.linear(x) + m.bias)
    with pytest.raises(ExtractionError, match=r"linear\.bias is also read as a tensor of its own"):
        extract(step, "export")
    inference = replace(step, training=False, loss=None, inputs=(X,))
    extraction = extract(inference, "export")
    with torch.no_grad():
        step.model.get_parameter("linear.bias").add_(1)
    with pytest.raises(ValueError, match="bias of Plain has changed"):
        extraction.check_constants()


def test_a_model_that_writes_into_one_is_not_exported() -> None:
    step = step_of(lambda m, x: m.linear(x) + m.table.add_(1))
    with pytest.raises(ExtractionError, match=r"writes into table, .* with register_buffer"):
        extract(step, "export")
