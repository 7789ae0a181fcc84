"""Models that ask torch whether they are traced are traced only if that changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.external_utils import is_compiling as is_compiling_by_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling, is_exporting
from torch.fx._symbolic_trace import is_fx_tracing
from torch.jit._trace import is_tracing
from torch.nn.functional import dropout

from graphs.extract import ExtractionError, Workload, extract
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, assert_same, squared, state_of

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.1
WAYS: dict[str, Callable[[], bool]] = {
    "exporting": lambda: bool(torch.compiler.is_exporting()),
    "exporting, imported": is_exporting,
    "compiling": lambda: bool(torch.compiler.is_compiling()),
    "compiling, imported": is_compiling,
    "compiling, by dynamo": is_compiling_by_dynamo,
    "traced by fx": is_fx_tracing,
}
"""Ways to ask that torch answers otherwise under export."""

Function = Callable[..., Any]
either = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


def step_of(
    function: Function, *, training: bool = True, dtype: str = "fp32", **modules: nn.Module
) -> Workload:
    torch.manual_seed(0)
    model = Plain(function, linear=nn.Linear(8, 8), **modules)
    model.register_buffer("count", torch.zeros(2))
    inputs = (X, torch.ones(4, 8)) if training else X
    loss = squared if training else None
    return Workload.of(model, inputs, loss, training=training, dtype=dtype)


RUNS: dict[int, int] = {}


class Runs:
    """Counts the runs of a function of a model on real tensors, which no trace has."""

    def __init__(self, function: Function) -> None:
        self.function = function
        RUNS[id(self)] = 0  # an attribute would be as before after each run

    def __call__(self, m: Any, x: Tensor) -> Any:
        if not isinstance(x, FakeTensor) and type(x) is Tensor:
            RUNS[id(self)] += 1
        return self.function(m, x)

    @property
    def count(self) -> int:
        return RUNS[id(self)]

    def __deepcopy__(self, memo: object) -> Runs:
        return self  # copies of the model count, too


# --- who computes something else is not told


@pytest.mark.slow_repeats
@either
def test_a_model_that_computes_something_else_under_export_is_not_told_of_it(
    training: bool,
) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x)
        return y if any(asks() for asks in WAYS.values()) else y * 1.01

    extraction = extract(step_of(function, training=training))
    assert (extraction.extractor, extraction.fell_back) == ("export", ())
    one_process.assert_runs_as_eager(extraction)


@either
def test_a_model_that_fails_under_export_is_not_told_of_it(training: bool) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        mask = None if is_exporting() else torch.ones(x.shape)
        y: Tensor = m.linear(x)
        return y * mask[:, :1]  # type: ignore[index]

    extraction = extract(step_of(function, training=training))
    assert (extraction.extractor, extraction.fell_back) == ("export", ())
    one_process.assert_runs_as_eager(extraction)


# --- what differs nevertheless is not exported


def knows(x: Tensor) -> bool:
    """Return whether a model is traced, which it sees by the class of a tensor, too."""
    return bool(is_exporting()) | isinstance(x, FakeTensor)


@pytest.mark.slow_repeats
@either
def test_a_model_that_sees_otherwise_that_it_is_traced_is_recorded(training: bool) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x)
        return y if knows(x) else y * 1.01

    extraction = extract(step_of(function, training=training))
    tried = extraction.fell_back[0]
    assert "asks torch whether it is traced" in tried.reason
    assert f'File "{__file__}"' in tried.reason
    assert ("the loss is" if training else "the output differs by") in tried.reason
    assert extraction.extractor == "dispatch"
    one_process.assert_runs_as_eager(extraction)


def other_gradient(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return y.detach() + 0 * y if knows(x) else y


def no_gradient(m: Any, x: Tensor) -> Any:
    y: Tensor = m.before(x)
    return m.linear(y.detach() if knows(x) else y)


def other_buffer(m: Any, x: Tensor) -> Any:
    if not knows(x):
        m.count.add_(1.0)
    return m.linear(x)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (other_gradient, "the gradient of linear"),
        (no_gradient, "the gradient of before"),
        (other_buffer, "count differs by"),
    ],
)
def test_gradients_and_buffers_are_compared_as_well(function: Function, what: str) -> None:
    with pytest.raises(ExtractionError, match=what):
        extract(step_of(function, before=nn.Linear(8, 8)), "export")


@pytest.mark.slow
def test_other_outputs_are_a_difference() -> None:
    def more(m: Any, x: Tensor) -> Any:
        y = m.linear(x)
        return (y, x + 1) if knows(x) else (y,)

    def larger(m: Any, x: Tensor) -> Any:
        return m.linear(x)[:3] if knows(x) else m.linear(x)

    for function in (more, larger):
        with pytest.raises(ExtractionError, match="output"):
            extract(step_of(function, training=False), "export")


def test_half_precision_does_not_hide_a_difference() -> None:
    def scaled(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x)
        return y * 1.1 if knows(x) else y

    for training in (True, False):
        with pytest.raises(ExtractionError, match="something else"):
            extract(step_of(scaled, training=training, dtype="bf16"), "export")


def encoder(**options: Any) -> Workload:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, **options).eval()
    padding = torch.arange(5).expand(2, 5) > torch.tensor([[2], [4]])
    inputs = {"src": torch.randn(2, 5, 8), "src_key_padding_mask": padding}
    return Workload.of(model, inputs, training=False)


@pytest.mark.slow
@pytest.mark.parametrize("extractor", ["export", "dispatch"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_torch_encoder_whose_padding_becomes_zeros_is_refused(extractor: str) -> None:
    for check in (True, False):
        with pytest.raises(ExtractionError, match="enable_nested_tensor=False"):
            extract(encoder(mask_check=check), extractor)
    extraction = extract(encoder(enable_nested_tensor=False), extractor)
    one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow
@either
def test_paligemma_with_a_mask_of_ones_is_not_exported(training: bool) -> None:
    transformers = pytest.importorskip("transformers")
    words = {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text = {**words, **small, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(
            text_config=transformers.GemmaConfig(**text),
            vision_config=transformers.SiglipVisionConfig(
                **small, num_attention_heads=4, image_size=16, patch_size=4
            ),
            image_token_id=98,
            projection_dim=32,
        )
    )
    ids = torch.randint(3, 90, (2, 24))
    ids[:, 2:18] = 98
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "attention_mask": torch.ones_like(ids),
    }
    given = {**inputs, "labels": ids.clone()} if training else inputs | {"use_cache": False}
    extraction = extract(Workload.of(model, given, training=training))
    assert extraction.extractor == "dispatch"
    assert "masking_utils.py" in extraction.fell_back[0].reason
    one_process.assert_runs_as_eager(extraction)


# --- what does not differ is


@pytest.mark.slow_repeats
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_that_asks_without_effect_is_exported(way: str, training: bool) -> None:
    asks = WAYS[way]
    function = Runs(lambda m, x: m.linear(x) if asks() else (2 * m.linear(x)) / 2)
    step = step_of(function, training=training)
    before = state_of(step), torch.get_rng_state()
    extraction = extract(step)
    assert (extraction.extractor, extraction.fell_back) == ("export", ())
    assert function.count == 1
    assert_same((state_of(step), torch.get_rng_state()), before)
    assert all(parameter.grad is None for parameter in step.model.parameters())
    one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow_repeats
@either
def test_a_model_that_does_not_ask_is_not_run(training: bool) -> None:
    function = Runs(lambda m, x: m.norm(m.linear(x)).relu())
    step = step_of(function, training=training, norm=nn.BatchNorm1d(8))
    step.model.register_forward_hook(lambda *_: None)  # torch itself asks where hooks are called
    assert extract(step, "export").extractor == "export"
    assert function.count == 0


def test_a_model_that_asks_what_torch_answers_as_always_is_not_run() -> None:
    answer: Callable[[], bool] = is_tracing
    function = Runs(lambda m, x: m.linear(x) if answer() else m.linear(x) * 2)
    extraction = extract(step_of(function), "export")
    assert function.count == 0
    one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow
def test_rounding_is_no_difference() -> None:
    def summed(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x)
        return y.cumsum(1) if is_exporting() else y.double().cumsum(1).to(y.dtype)

    for dtype in ("fp32", "bf16"):
        for training in (True, False):
            step = step_of(summed, training=training, dtype=dtype)
            assert extract(step, "export").extractor == "export"


def test_dropout_and_batch_norm_give_the_same_under_both() -> None:
    def random_numbers(m: Any, x: Tensor) -> Tensor:
        is_exporting()
        return dropout(m.norm(m.linear(x)), 0.5) + torch.rand_like(x)

    assert extract(step_of(random_numbers, norm=nn.BatchNorm1d(8)), "export").extractor == "export"


def test_results_that_differ_from_run_to_run_are_not_compared() -> None:
    def random_factor(m: Any, x: Tensor) -> Any:
        is_exporting()
        return m.linear(x) * random.random()

    assert extract(step_of(random_factor), "export").extractor == "export"


def test_a_model_on_the_meta_device_is_exported_without_comparison() -> None:
    step = step_of(lambda m, x: m.linear(x) * (2.0 if is_exporting() else 1.0))
    step.model.to("meta")
    assert extract(step).extractor == "export"


def test_what_torch_answers_is_as_before() -> None:
    functions: tuple[Any, ...] = (is_compiling, is_exporting, is_fx_tracing)
    before = [(one.__code__, one.__kwdefaults__) for one in functions]
    overridden = torch.overrides.has_torch_function
    extract(step_of(lambda m, x: m.linear(x) if is_exporting() else m.linear(x) * 1))
    assert [(one.__code__, one.__kwdefaults__) for one in functions] == before
    assert torch.overrides.has_torch_function is overridden
