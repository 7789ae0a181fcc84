"""Errors and warnings of extraction for unsupported steps, and state that must not change."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from envs.executors.cores.instruction_lists import device_lists
from graphs.extract import ExtractionError, StepError, Workload, dispatch, errors, extract
from graphs.extract.errors import first_line
from graphs.extract.extraction import EXTRACTORS
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, assert_same, eager, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
EVERY_WAY = pytest.mark.parametrize("extractor", ["auto", *EXTRACTORS])


# --- unexpected failures of an extractor


def vmapped() -> Workload:
    torch.manual_seed(0)
    model = Plain(lambda m, x: torch.vmap(m.linear)(x), linear=nn.Linear(8, 8))
    return Workload.of(model, (X, X.flip(0)), squared)


def test_a_model_with_vmap_is_placed_on_cores() -> None:
    extraction = extract(vmapped())
    assert extraction.extractor == "export"
    count = extraction.program.op_count
    lists = device_lists(extraction.program, [i % 2 for i in range(count)], range(count), 2)
    found, expected = one_process.run(extraction, lists), eager(extraction.step)
    torch.testing.assert_close(found.output, expected.output.detach())
    torch.testing.assert_close(found.gradients, expected.gradients)


def test_what_devices_of_torch_cannot_run_is_told_when_they_are_asked_for() -> None:
    with pytest.raises(ExtractionError, match="cannot be placed on cuda") as refused:
        assert extract(vmapped()).forward
    assert "BatchedTensorImpl" in str(refused.value)


def test_a_formula_that_fails_is_a_refusal_with_what_it_says() -> None:
    def no_formula(*_: Any, **__: Any) -> int:
        raise NotImplementedError("no count of hypotenuses yet")

    packet = torch.ops.aten.hypot
    flop_registry[packet] = no_formula
    try:
        model = Plain(lambda m, x: torch.hypot(m.linear(x), x), linear=nn.Linear(8, 8))
        with pytest.raises(ExtractionError, match=r"NotImplementedError: no count of .* yet\."):
            extract(Workload.of(model, X, training=False), "export")
    finally:
        del flop_registry[packet]


# --- faulty steps


@EVERY_WAY
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_in_training(kind: Any, extractor: str) -> None:
    def looked_up(m: Any, rows: Tensor) -> Tensor:
        out: Tensor = m.table(rows).sum()
        return out

    rows = torch.tensor([[1, 2], [2, 0]])
    table = kind(3, 4, sparse=True)
    step = Workload.of(Plain(looked_up, table=table), rows)
    with pytest.raises(StepError, match="sparse=False") as refused:
        extract(step, extractor)
    assert f"{kind.__name__} table has sparse gradients" in str(refused.value)
    assert extract(Workload.of(step.model, rows, training=False)).graph


def test_a_table_that_is_not_trained_has_no_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(3, 8, sparse=True), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    assert extract(Workload.of(model, (torch.tensor([0, 2, 1, 1]), X), squared)).fell_back == ()


@EVERY_WAY
@pytest.mark.parametrize("training", [True, False])
def test_a_lazy_module_has_to_run_first(training: bool, extractor: str) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    with pytest.raises(StepError, match=r"^0\.weight of Sequential.*run the model once first"):
        extract(Workload.of(model, (X, X), squared, training=training), extractor)


@EVERY_WAY
def test_what_fails_under_autocast_only_is_told_to_leave_it(extractor: str) -> None:
    def correlated(m: Any, x: Tensor) -> Tensor:
        return torch.dot(m.linear(x).flatten(), x.flatten())

    step = Workload.of(Plain(correlated, linear=nn.Linear(8, 8)), X)
    assert extract(step, extractor).graph
    with pytest.raises(ExtractionError, match="place it in fp32") as refused:
        extract(replace(step, dtype="bf16"), extractor)
    assert refused.value.remedy == "fp32"
    assert "under torch.autocast in bf16" in str(refused.value)


# --- wording of messages


def test_a_file_name_that_torch_cannot_take_is_told_as_such() -> None:
    source = "def forward(m, x):\n    return m.linear(x).relu()\n"
    found: dict[str, Any] = {}
    exec(compile(source, "model\udcff.py", "exec"), found)
    step = Workload.of(Plain(found["forward"], linear=nn.Linear(8, 8)), X, training=False)
    with pytest.raises(ExtractionError, match=r"file names that are not UTF-8.*Rename the file"):
        extract(step, "export")


@pytest.mark.parametrize(
    ("shown", "expected"), [(object(), "bad object"), (squared, "bad function squared")]
)
def test_objects_are_shown_without_their_addresses(shown: object, expected: str) -> None:
    assert first_line(ValueError(f"bad {shown!r}.\nMore of it")) == expected


def test_a_long_reason_is_cut() -> None:
    assert len(first_line(ValueError("word " * 100))) <= 300


# --- the model is not changed


class Remembering(nn.Module):
    """Keeps results in attributes that are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last: Tensor | None = None
        self.calls = 0
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Any] = {"first": None}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.last = y
        self.calls += 1
        self.extra = y
        self.seen.append(y)
        self.by_name["first"] = self.by_name["second"] = y
        return y


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_attributes_of_a_model_are_left_as_they_were(extractor: str, device: str) -> None:
    model = Remembering().to(device)
    seen, by_name = model.seen, model.by_name
    before = copy.copy(vars(model))
    extract(Workload.of(model, (X, X), squared), extractor)
    assert vars(model).keys() == before.keys()
    assert model.last is None
    assert model.calls == 0
    assert model.seen is seen
    assert seen == []
    assert model.by_name is by_name
    assert by_name == {"first": None}
    if device == "cpu":
        with torch.no_grad():
            assert_same(model(X), model.linear(X))


def test_the_search_for_a_line_of_the_model_stops_where_the_recording_begins() -> None:
    code = dispatch.record.__code__
    assert (code.co_filename, code.co_name) == errors.RECORDING


@EVERY_WAY
def test_an_error_of_a_plain_torch_model_names_no_line_of_this_project(extractor: str) -> None:
    step = Workload.of(nn.Sequential(nn.Linear(7, 2)), (X, torch.zeros(4, 2)), nn.MSELoss())
    with pytest.raises(ExtractionError) as refused:
        extract(step, extractor)
    assert 'File "' not in str(refused.value)
