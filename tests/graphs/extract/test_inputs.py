"""Inputs of steps: modes, keywords, numbers, and dynamic sizes."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.extract import Extraction, ExtractionError, StepError, Workload, extract
from graphs.extract.extraction import EXTRACTORS
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, assert_same, eager, forward, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
LINEAR = nn.Linear(8, 8)


def linear_step(function: Callable[..., Any], *inputs: Any, training: bool = True) -> Workload:
    return Workload.of(Plain(function, linear=nn.Linear(8, 8)), inputs or X, training=training)


def total(extraction: Extraction, attribute: str) -> int:
    return sum(data[attribute] for _, data in extraction.graph.nodes(data=True))


def test_a_model_in_eval_mode_is_trained_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    assert "1:native_dropout" in extract(Workload.of(model, (X, X), squared)).graph


def test_a_training_step_can_be_extracted_where_gradients_are_off() -> None:
    step = linear_step(lambda m, x: m.linear(x).sum())
    with torch.no_grad():
        graph = extract(step).graph
    assert "linear:backward/mm" in graph


def test_torch_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExtractionError):
        extract(linear_step(lambda m, x: m.linear(x[:, :3]).sum()))
    extract(linear_step(lambda m, x: m.linear(x), training=False))
    out, err = capfd.readouterr()
    assert out == err == ""


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    step = Workload.of(nn.Linear(8, 8), (X, X), squared)
    extraction = extract(step)
    other = Workload.of(step.model, (X, X + 1), squared)
    found = one_process.run_placed(replace(extraction, step=other))
    assert_same(found.output, eager(other).output.detach())


class Scaled(nn.Module):
    """Takes a keyword-only argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * scale
        return out


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_of_keywords_the_one_that_the_model_does_not_take_is_the_target(extractor: str) -> None:
    inputs = {"x": X, "target": X.flip(0), "scale": torch.tensor(2.0)}
    step = Workload.of(Scaled(), inputs, squared)
    by_hand = squared(step.model(X, scale=torch.tensor(2.0)), X.flip(0))
    assert_same(forward(copy.deepcopy(step)), by_hand)
    assert total(extract(step, extractor), "gradient_bytes") == 4 * (8 * 8 + 8)
    alone = Workload.of(step.model, inputs, squared, training=False)
    assert_same(forward(copy.deepcopy(alone)), step.model(X, scale=torch.tensor(2.0)).detach())


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_numbers_among_the_inputs_are_part_of_the_step(extractor: str) -> None:
    def scaled(m: Any, n: int, x: Tensor, flag: bool | None, y: Tensor) -> Tensor:
        assert flag is None
        out: Tensor = (m.linear(x) * n - y).sum()
        return out

    step = Workload.of(Plain(scaled, linear=nn.Linear(8, 8)), (3, X, None, X))
    extraction = extract(step, extractor)
    if extractor != "modules":
        assert [s.name for s in extraction.program.sources if s.role == "input"] == ["0", "1"]
        one_process.assert_runs_as_eager(extraction)


@dataclass
class Batch:
    x: Tensor
    weights: UserDict[str, Tensor]


class Edges:
    def __init__(self, x: Tensor) -> None:
        self.parts = [x]


def weighted(m: Any, first: Batch, n: int, *, nested: dict[str, list[Edges]]) -> Tensor:
    out: Tensor = m.linear(first.x) * first.weights["w"] * n
    return (out + nested["a"][0].parts[0]).sum()


def of_objects(x: Tensor, training: bool) -> Workload:
    inputs = (Batch(x, UserDict(w=x.abs())), 3)
    model = Plain(weighted, linear=LINEAR)
    return Workload(model, inputs, {"nested": {"a": [Edges(x * 2)]}}, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_tensors_in_objects_are_inputs(extractor: str, training: bool) -> None:
    extraction = extract(of_objects(X, training), extractor)
    if extractor != "modules":
        inputs = [s.name for s in extraction.program.sources if s.role == "input"]
        assert inputs == ["0", "1", "2"]
        other = replace(extraction, step=of_objects(X.flip(0) + 1, training))
        one_process.assert_runs_as_eager(other)


@pytest.mark.parametrize("extractor", ["auto", *EXTRACTORS])
def test_objects_whose_tensors_cannot_be_found_are_refused(extractor: str) -> None:
    holder = SimpleNamespace(x=X)
    with pytest.raises(StepError, match=r"input \[0\] is a SimpleNamespace.*make the Simple"):
        extract(linear_step(lambda m, given: m.linear(given.x).sum(), holder), extractor)


def test_an_object_of_a_module_that_gets_another_tensor_is_refused() -> None:
    def counting(m: Any, x: Tensor) -> Tensor:
        m.state.count = m.state.count + 1
        out: Tensor = m.linear(x).sum() * m.state.count
        return out

    step = linear_step(counting)
    vars(step.model)["state"] = SimpleNamespace(count=torch.ones(()))
    with pytest.raises(ExtractionError, match="assigns state, which it reads"):
        extract(step, "dispatch")


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_sizes_that_follow_the_input_are_those_of_the_example(extractor: str) -> None:
    def padded(m: Any, x: Tensor) -> Tensor:
        filler = x.new_ones(7 - x.shape[0], x.shape[1])
        out: Tensor = m.linear(torch.cat([x, filler])).sum()
        return out

    extraction = extract(linear_step(padded), extractor)
    assert total(extraction, "flops") == (2 * 7 * 8 * 8) * 2
    if extractor != "modules":
        one_process.assert_runs_as_eager(extraction)


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_a_program_with_dynamic_sizes_is_placed_for_the_example(extractor: str) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 2)).eval()
    program = torch.export.export(model, (X,), dynamic_shapes=({0: batch},))
    dynamic = program.module(check_guards=False)
    for module in dynamic.modules():
        module.training = False
    extraction = extract(Workload(dynamic, (X,), training=False), extractor)
    assert total(extraction, "flops") == 2 * 4 * (8 * 8 + 8 * 2)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(StepError, match="the model is the class Linear, not an instance of torch"):
        Workload.of(nn.Linear, X, training=False)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(StepError, match="the model is an instance of function, not an"):
        Workload.of(lambda x: x, X, training=False)  # type: ignore[arg-type]  # on purpose
