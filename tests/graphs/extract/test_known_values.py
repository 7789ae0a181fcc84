"""Reads of values that no data decides: models with them are exported, and hold for any data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.extract import Extraction, Workload, extract
from graphs.extract.reads.known_values import Range
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, squared

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.1


def extracted(
    function: Callable[..., Any],
    extractor: str = "auto",
    *,
    training: bool = True,
    p: float = 0.0,
) -> Extraction:
    torch.manual_seed(0)
    model = Plain(function, linear=nn.Linear(8, 8))
    model.p = p  # type: ignore[assignment]
    step = Workload.of(model, (X, torch.ones(4, 8)), squared, training=training)
    return extract(step, extractor)


# --- decided: all of these compute relu(linear(x))


def layer_drop(m: Any, x: Tensor) -> Any:
    drawn = torch.rand([])
    return m.linear(x).tanh() if drawn < m.p else m.linear(x).relu()


def layer_kept(m: Any, x: Tensor) -> Any:
    return m.linear(x).relu() if bool(torch.rand(2, 1).squeeze(1).le(1.0).all()) else m.linear(x)


def item_drawn(m: Any, x: Tensor) -> Any:
    return m.linear(x).tanh() if torch.rand([]).item() < m.p else m.linear(x).relu()


def float_drawn(m: Any, x: Tensor) -> Any:
    return m.linear(x).relu() if float(torch.rand(())) >= 0.0 else m.linear(x)


def never_drawn(m: Any, x: Tensor) -> Any:
    dropped = torch.bernoulli(torch.full((3,), m.p)).any()
    return m.linear(x).tanh() if dropped else m.linear(x).relu()


def own_mask(m: Any, x: Tensor) -> Any:
    mask = torch.ones(x.shape, dtype=torch.bool)
    return m.linear(x).relu() if mask.all() else m.linear(x)


def mask_like(m: Any, x: Tensor) -> Any:
    steps = torch.zeros_like(x[0], dtype=torch.int64) + torch.arange(8)
    return m.linear(x).relu() if max(steps.tolist()) == 7 else m.linear(x)


def uniform_drawn(m: Any, x: Tensor) -> Any:
    return m.linear(x).tanh() if torch.empty(()).uniform_(0, 1) < m.p else m.linear(x).relu()


DECIDED = (
    *(layer_drop, layer_kept, item_drawn, float_drawn, never_drawn),
    *(own_mask, mask_like),
)

# --- not decided


def drop_some(m: Any, x: Tensor) -> Any:
    return m.linear(x).tanh() if torch.rand([]) < 0.5 else m.linear(x).relu()


def item_some(m: Any, x: Tensor) -> Any:
    return m.linear(x).tanh() if torch.rand([]).item() < 0.5 else m.linear(x).relu()


def item_kept(m: Any, x: Tensor) -> Any:
    drawn = torch.rand([]).item()
    return m.linear(x) * drawn if drawn >= 0.0 else m.linear(x)


def item_whole(m: Any, x: Tensor) -> Any:
    return m.linear(x).tanh() if round(torch.rand([]).item()) < 1 else m.linear(x).relu()


def draw_written(m: Any, x: Tensor) -> Any:
    drawn = torch.rand(2)
    drawn[:1].mul_(100)
    return m.linear(x).tanh() if (drawn < 1.0).all() else m.linear(x).relu()


def draw_cast(m: Any, x: Tensor) -> Any:
    drawn = torch.randint(-5, 5, ()).to(torch.uint8)
    return m.linear(x).tanh() if drawn < 5 else m.linear(x).relu()


def draw_rounded(m: Any, x: Tensor) -> Any:
    drawn = torch.rand([]).bfloat16()
    return m.linear(x).tanh() if drawn < 1.0 else m.linear(x).relu()


def draw_of_other_bits(m: Any, x: Tensor) -> Any:
    drawn = torch.rand(1).view(torch.int32)
    return m.linear(x).tanh() if (drawn < 2).all() else m.linear(x).relu()


def mask_written(m: Any, x: Tensor) -> Any:
    mask = torch.ones(4, 8)
    mask[0] = x[0]
    return m.linear(x).relu() if mask.all() else m.linear(x)


def mask_of_data(m: Any, x: Tensor) -> Any:
    return m.linear(x).relu() if (torch.ones(4, 8) * x).all() else m.linear(x)


def mask_of_buffer(m: Any, x: Tensor) -> Any:
    return m.linear(x).relu() if (m.linear.bias < 100).all() else m.linear(x)


def statistics_written(m: Any, x: Tensor) -> Any:
    mean, deviation = torch.zeros(8), torch.ones(8)
    torch.nn.functional.batch_norm(x, mean, deviation, training=True)
    return m.linear(x).tanh() if mean.sum() > 0 else m.linear(x).relu()


def draw_beside_a_rounded_one(m: Any, x: Tensor) -> Any:
    drawn = torch.rand([]) < torch.ones(1, dtype=torch.bfloat16)
    return m.linear(x).tanh() if drawn else m.linear(x).relu()


def whole_drawn(m: Any, x: Tensor) -> Any:
    below = torch.randint(0, 6, (3,), dtype=torch.uint8) < 258  # which wraps
    return m.linear(x).tanh() if below.all() else m.linear(x).relu()


def read_in_vain(m: Any, x: Tensor) -> Any:
    try:
        is_large = bool(x.sum() > 100)
    except Exception:  # noqa: BLE001  # as models do
        is_large = True
    return m.linear(x).tanh() if is_large else m.linear(x).relu()


def packed(m: Any, x: Tensor) -> Any:
    lengths = 1 + (x[:, 0] > 100).long() + (x[:, 1] > -100).long()
    rows = torch.nn.utils.rnn.pack_padded_sequence(x[:, :4, None], lengths, True, False)
    return m.linear(x) * rows.data.shape[0]


OPEN = (
    *(drop_some, item_some, item_kept, item_whole),
    *(statistics_written, draw_beside_a_rounded_one, whole_drawn, read_in_vain, packed),
    *(draw_written, draw_cast, draw_rounded, draw_of_other_bits),
    *(mask_written, mask_of_data, mask_of_buffer),
)


def each(functions: tuple[Callable[..., Any], ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function", functions, ids=lambda one: str(one.__name__))


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@each(DECIDED)
def test_a_value_that_no_data_decides_is_known_to_an_export(
    function: Callable[..., Any], training: bool
) -> None:
    extraction = extracted(function, training=training)
    assert (extraction.extractor, extraction.fell_back) == ("export", ())
    assert extraction.unchecked == ()
    plain = extracted(lambda m, x: m.linear(x).relu(), training=training)
    assert extraction.program.op_count == plain.program.op_count
    assert extraction.forward_program is not None
    one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow_repeats
@each((*DECIDED, uniform_drawn))
def test_a_recording_of_reads_that_no_data_decides_holds_for_any_data(
    function: Callable[..., Any],
) -> None:
    extraction = extracted(function, "dispatch")
    assert extraction.depends_on_data == ()
    one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("extractor", ["auto", "dispatch"])
@each(OPEN)
def test_other_reads_still_depend_on_data(function: Callable[..., Any], extractor: str) -> None:
    extraction = extracted(function, extractor)
    assert extraction.extractor == "dispatch"
    assert extraction.depends_on_data


def test_a_value_computed_under_autocast_is_not_taken_for_that_in_full_precision() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        product = (torch.full((1, 1), 257.0) @ torch.ones(1, 1)).item()
        return m.linear(x).tanh() if product > 256.5 else m.linear(x).relu()

    model = Plain(forward, linear=nn.Linear(8, 8))
    step = Workload.of(model, X, training=False, dtype="bf16")
    one_process.assert_runs_as_eager(extract(step))


def test_a_tensor_of_the_model_that_only_steers_may_not_change() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.linear(x).tanh() if m.flag > 0 else m.linear(x).relu()

    model = Plain(forward, linear=nn.Linear(8, 8))
    model.flag = torch.tensor(1.0)
    extraction = extract(Workload.of(model, X, training=False), "dispatch")
    extraction.check_constants()
    model.flag.fill_(-1.0)
    with pytest.raises(ValueError, match="flag"):
        extraction.check_constants()


@pytest.mark.parametrize("function", [layer_drop, item_drawn, never_drawn])
def test_layers_dropped_at_random_depend_on_chance(function: Callable[..., Any]) -> None:
    assert extracted(function, p=0.1).depends_on_data


def test_layer_drop_keeps_the_random_numbers_of_dropout() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        asked = torch.compiler.is_exporting()
        drawn = torch.rand([])
        kept = m.linear(x) if drawn >= 0 else x
        return torch.nn.functional.dropout(kept, 0.5) if asked or x.shape[0] else kept

    assert extracted(forward).extractor == "export"


def test_a_distribution_checks_what_it_is_given() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        scored: Tensor = torch.distributions.Normal(m.linear(x), x, validate_args=True).log_prob(x)  # type: ignore[no-untyped-call]  # torch's own
        return scored

    for extractor in ("export", "dispatch"):
        extraction = extracted(forward, extractor)
        assert extraction.depends_on_data == ()
        assert all("test_known_values" in line for line in extraction.unchecked)
        assert extraction.unchecked
        one_process.assert_runs_as_eager(extraction)


def test_ctc_reads_lengths_only() -> None:
    labels = torch.tensor([[1, 2], [3, 4]])

    def scored(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        logits = m.linear(x)[:, None].expand(-1, 2, -1).log_softmax(-1)
        return torch.nn.functional.ctc_loss(logits, labels, torch.full((2,), 4), lengths)

    assert not extracted(lambda m, x: scored(m, x, torch.full((2,), 2))).depends_on_data
    of_data = extracted(lambda m, x: scored(m, x, 1 + (x[:2, 0] > 100).long()))
    assert of_data.depends_on_data


@pytest.mark.parametrize(
    ("one", "comparison", "other", "expected"),
    [
        (Range(0, 1, is_open=True), "lt", Range(0, 0), False),
        (Range(0, 1, is_open=True), "lt", Range(1, 1), True),
        (Range(0, 1, is_open=True), "ge", Range(1, 1), False),
        (Range(0, 1, is_open=True), "gt", Range(0, 0), None),
        (Range(0, 1, is_open=True), "le", Range(-1, -1), False),
        (Range(0, 1, is_open=True), "ge", Range(0, 0), True),
        (Range(0, 1), "lt", Range(1, 1), None),
        (Range(0, 1), "le", Range(1, 1), True),
        (Range(0, 1), "eq", Range(2, 2), False),
        (Range(0, 1), "ne", Range(2, 2), True),
        (Range(0, 1), "eq", Range(1, 1), None),
        (Range(0, 1), "lt", Range(float("nan"), float("nan")), None),
    ],
)
def test_a_comparison_is_decided_if_no_number_of_the_range_changes_it(
    one: Range, comparison: str, other: Range, expected: bool | None
) -> None:
    assert one.compared(comparison, other) is expected
