"""Errors and warnings of extraction for unsupported steps, and state that must not change."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as QuantizedLinear
from torch.utils.flop_counter import flop_registry

from graphs.extract import ExtractionError, StepError, Workload, dispatch, errors, extract
from graphs.extract.errors import short_reason
from graphs.extract.extraction import EXTRACTORS
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
EVERY_WAY = pytest.mark.parametrize("extractor", ["auto", *EXTRACTORS])


# --- unexpected failures of an extractor


def vmapped() -> Workload:
    torch.manual_seed(0)
    model = Plain(lambda m, x: torch.vmap(m.linear)(x), linear=nn.Linear(8, 8))
    return Workload.of(model, (X, X.flip(0)), squared)


def test_a_model_with_vmap_is_placed_on_cores_only() -> None:
    extraction = extract(vmapped())
    assert extraction.extractor == "export"
    one_process.assert_runs_as_eager(extraction)
    with pytest.raises(
        ExtractionError, match=r"no forward pass of single calls.*BatchedTensorImpl"
    ):
        assert extraction.forward


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            None,
            r"no loss is given and the model returned a tensor of shape .*loss=.*training=False",
        ),
        (lambda output, target: output - target, "the loss function returned a tensor of shape"),
    ],
)
def test_a_step_without_a_scalar_loss_is_refused_in_one_sentence(loss: Any, message: str) -> None:
    with pytest.raises(StepError, match=message) as refused:
        extract(Workload.of(nn.Linear(8, 8), (X, X)[: 1 + (loss is not None)], loss))
    assert ". " not in str(refused.value)


def test_unknown_extractors_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="export, dispatch, modules"):
        extract(vmapped(), "dynamo")


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


def linear_step(function: Callable[..., Any], *inputs: Any, training: bool = True) -> Workload:
    return Workload.of(Plain(function, linear=nn.Linear(8, 8)), inputs or X, training=training)


def branching(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() if x.sum() > 0 else x.sum()
    return out


def counting(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)[: int(x.sum().item())].sum()
    return out


def masking(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)[x[:, 0] > 0].sum()
    return out


def conditional(m: Any, x: Tensor) -> Tensor:
    branches = (lambda y: y.sin(), lambda y: y.cos())
    out: Tensor = torch.cond(x.sum() > 0, *branches, (m.linear(x),)).sum()
    return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branching, "control flow"),
        (counting, "depends on"),
        (masking, "depends on"),
        (conditional, "higher-order ops"),
        (lambda m, x: m.linear(x.add_(1)).sum(), "in place; clone it first"),
        (lambda m, x: m.linear(x[:, :3]).sum(), "must run on the example inputs"),
        (lambda m, x: m.missing(x), "has no attribute 'missing'"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_a_sentence(
    function: Callable[..., Any], reason: str, training: bool
) -> None:
    with pytest.raises(ExtractionError) as refused:
        extract(linear_step(function, training=training), "export")
    text = str(refused.value)
    assert reason in text
    assert len(text) < 600
    assert "\n" not in text
    line = f'{__file__}", line {function.__code__.co_firstlineno + 1}'
    assert line in text or function is not branching


def test_an_input_that_requires_a_gradient_is_refused() -> None:
    step = linear_step(lambda m, x, y: (m.linear(x) * y).sum(), X, X.clone().requires_grad_())
    with pytest.raises(ExtractionError, match="tensor 1 of the inputs requires a gradient"):
        extract(step, "export")


def table(kind: Any) -> Workload:
    rows = torch.tensor([[1, 2], [2, 0]])
    return Workload.of(Plain(lambda m, x: m.table(x).sum(), table=kind(3, 4, sparse=True)), rows)


def lazy(training: bool) -> Workload:
    return Workload.of(nn.Sequential(nn.LazyLinear(8)), (X, X), squared, training=training)


@pytest.mark.slow_repeats
@EVERY_WAY
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear_step(lambda m, x: m.linear(x)), r"scalar loss.*tensor of shape \(4, 8\)"),
        (lambda: linear_step(lambda m, x: {"logits": m.linear(x)}), "scalar loss.*dict"),
        (lambda: linear_step(lambda m, x: m.linear(x).argmax()), r"scalar loss.*shape \(\)"),
        (
            lambda: linear_step(lambda m, n, x, y: (m.linear(x) + y.mul_(2)).sum(), 1, X, X + 1),
            "tensor 1 of its inputs in place; clone it first",
        ),
        (
            lambda: Workload.of(nn.Linear(8, 8).requires_grad_(False), (X, X), squared),
            "no parameter that requires a gradient",
        ),
        (lambda: Workload.of(nn.Identity(), X, training=False), "runs no ops"),
        (lambda: table(nn.Embedding), "^Embedding table has sparse gradients.*sparse=False"),
        (lambda: table(nn.EmbeddingBag), "^EmbeddingBag table has sparse gradients"),
        (lambda: Workload.of(nn.Linear(8, 8), (), squared), "target"),
        (lambda: lazy(True), r"^0\.weight of Sequential.*run the model once first"),
        (lambda: lazy(False), r"^0\.weight of Sequential.*run the model once first"),
    ],
)
def test_a_fault_of_the_step_is_told_once(
    extractor: str, make: Callable[[], Workload], message: str
) -> None:
    with pytest.raises(StepError, match=message) as refused:
        extract(make(), extractor)
    assert "no extractor takes" not in str(refused.value)


@pytest.mark.slow
def test_sparse_tables_are_no_fault_where_they_are_not_trained() -> None:
    step = table(nn.Embedding)
    assert extract(Workload.of(step.model, step.inputs, training=False)).graph
    model = nn.Sequential(nn.Embedding(3, 8, sparse=True), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    assert extract(Workload.of(model, (torch.tensor([0, 2, 1, 1]), X), squared)).fell_back == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_fails_by_itself_is_refused_with_its_own_reason(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(3, 3)).to(device)
    with pytest.raises(StepError, match="must run on the example inputs") as refused:
        extract(Workload.of(model, (X, X), squared))
    assert "no extractor takes" not in str(refused.value)


@pytest.mark.slow_repeats
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


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        made: nn.Module = torch.jit.script(module)
    return made


@EVERY_WAY
@pytest.mark.parametrize("training", [True, False])
def test_modules_of_torchscript_are_refused_with_their_path(extractor: str, training: bool) -> None:
    for model, path in (
        (nn.Sequential(scripted(nn.Linear(8, 8)), nn.Linear(8, 8)), "0"),
        (scripted(nn.Linear(8, 8)), "RecursiveScriptModule"),
    ):
        with pytest.raises(StepError, match=rf"^{path} is a module of TorchScript \(Linear\)"):
            extract(Workload.of(model, (X, X), squared, training=training), extractor)


def test_a_model_that_runs_is_not_told_to_run() -> None:
    def untraceable(m: Any, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise ValueError("no tracing")
        out: Tensor = m.linear(x).sum()
        return out

    step = linear_step(untraceable)
    for extractor in ("export", "dispatch"):
        with pytest.raises(ExtractionError, match=r"step: no tracing \(.*\)\.$"):
            extract(step, extractor)
    extraction = extract(step)
    assert extraction.extractor == "modules"
    assert all("must run" not in tried.reason for tried in extraction.fell_back)


# --- wording of messages


@pytest.mark.parametrize("package", ["torch_geometric", "torchvision", "my_torch"])
def test_lines_of_packages_that_are_named_like_torch_are_told(package: str) -> None:
    file = str(Path(torch.__file__).parents[1] / package / "layers.py")
    names: dict[str, Any] = {}
    exec(compile("def forward(m, x):\n  return m.linear(x) * float(x.sum())", file, "exec"), names)
    step = linear_step(names["forward"], training=False)
    line = f'File "{file}", line 2, in forward'
    with pytest.raises(ExtractionError, match=re.escape(line)):
        extract(step, "export")
    assert extract(step, "dispatch").depends_on_data == (line,)


def test_a_file_name_that_torch_cannot_take_is_told_as_such() -> None:
    source = "def forward(m, x):\n    return m.linear(x).relu()\n"
    found: dict[str, Any] = {}
    exec(compile(source, "model\udcff.py", "exec"), found)
    step = Workload.of(Plain(found["forward"], linear=nn.Linear(8, 8)), X, training=False)
    with pytest.raises(ExtractionError, match=r"file names that are not UTF-8.*Rename the file"):
        extract(step, "export")


def test_a_reason_is_one_short_line_without_addresses() -> None:
    assert short_reason(ValueError(f"bad {object()!r}.\nMore of it")) == "bad object"
    assert short_reason(ValueError(f"bad {squared!r}")) == "bad function squared"
    assert len(short_reason(ValueError("word " * 100))) <= 300


# --- the model is not changed


class Remembering(nn.Module):
    """Keeps results in attributes that are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.results: list[Tensor] = []
        self.by_name: dict[str, Any] = {"first": None}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.calls += 1
        self.extra = y
        self.results.append(y)
        self.by_name["first"] = self.by_name["second"] = y
        return y


@pytest.mark.slow_repeats
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_attributes_of_a_model_are_left_as_they_were(extractor: str, device: str) -> None:
    model = Remembering().to(device)
    results, by_name = model.results, model.by_name
    before = vars(model).keys() | ()
    extract(Workload.of(model, (X, X), squared), extractor)
    assert vars(model).keys() == before
    assert model.calls == 0
    assert model.results is results
    assert model.by_name is by_name
    assert (results, by_name) == ([], {"first": None})


def test_the_search_for_a_line_of_the_model_stops_where_the_recording_begins() -> None:
    code = dispatch.record.__code__
    assert (code.co_filename, code.co_name) in errors.STARTS


@EVERY_WAY
def test_an_error_of_a_plain_torch_model_names_no_line_of_this_project(extractor: str) -> None:
    step = Workload.of(nn.Sequential(nn.Linear(7, 2)), (X, torch.zeros(4, 2)), nn.MSELoss())
    with pytest.raises(ExtractionError) as refused:
        extract(step, extractor)
    assert 'File "' not in str(refused.value)


# --- quantized weights


class Packed(nn.Linear):
    """Stands for a layer of bitsandbytes."""


class Subclass(Tensor):
    """Stands for a tensor of torchao."""


def packed() -> nn.Module:
    return nn.Sequential(nn.ReLU(), Packed(8, 8))


def subclassed() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_buffer("weights", torch.ones(3).as_subclass(Subclass))
    return model


def dynamic() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(QuantizedLinear(8, 8))  # type: ignore[no-untyped-call]  # of torch


@EVERY_WAY
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (dynamic, r"^0 is a Linear of torch\.ao\.nn\.quantized\.dynamic"),
        (packed, r"^1 is a Packed of bitsandbytes\.nn: quantized weights cannot be placed"),
        (subclassed, r"^weights of Sequential is a Subclass of torchao\.dtypes"),
    ],
)
def test_quantized_models_are_refused(
    build: Callable[[], nn.Module],
    message: str,
    extractor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Packed, "__module__", "bitsandbytes.nn")
    monkeypatch.setattr(Subclass, "__module__", "torchao.dtypes")
    step = Workload.of(build(), X, training=False)
    with pytest.raises(StepError, match=message):
        extract(step, extractor)


@pytest.mark.slow
def test_last_states_of_an_lstm_have_their_shapes_or_are_refused() -> None:
    step = Workload.of(nn.LSTM(4, 6, proj_size=3), torch.randn(5, 2, 4), training=False)
    shapes = []
    with suppress(StepError):
        program = extract(step).program
        shapes = [program.values[result.value].shape for result in program.results]
    assert shapes == [(5, 2, 3), (1, 2, 3), (1, 2, 6)] or torch.__version__ < "2.13"
