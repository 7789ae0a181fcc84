"""Costs in the graph, compared with what torch counts and saves in a real run."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from graphs.extract import Extraction, Workload, extract
from graphs.flops import call_flops, further_formulas
from graphs.models import TwoTowers, TwoTowersConfig
from tests.helpers import tiny_models, tiny_reference_models, tiny_transformers
from tests.helpers.extracted_steps import of_reference
from tests.helpers.in_turn import in_turn
from tests.helpers.tiny_models import Plain, forward, saved_bytes

pytest.importorskip("transformers")


def two_towers() -> Workload:
    pairs = torch.randn(3, 6), torch.randn(3, 6), torch.rand(3)
    model = TwoTowers(TwoTowersConfig(features=6, layers=3))
    return Workload.of(model, pairs, F.binary_cross_entropy_with_logits)


STEPS = {
    "inception": tiny_models.inception,
    "nmt": tiny_models.nmt,
    "two_towers": two_towers,
    **tiny_reference_models.STEPS,
    **tiny_transformers.STEPS,
}
EVERY_MODEL = pytest.mark.parametrize("name", in_turn(STEPS))
EITHER_MODE = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


def extracted(name: str, training: bool = True) -> Extraction:
    return _extracted(name, training)


@functools.cache
def _extracted(name: str, training: bool) -> Extraction:
    if name in tiny_reference_models.STEPS:
        return of_reference(name, training)
    torch.manual_seed(0)
    if name in tiny_transformers.TARGETS:
        return extract(tiny_transformers.load(tiny_transformers.TARGETS[name], training=training))
    return extract(replace(STEPS[name](), training=training))


def total(extraction: Extraction, attribute: str) -> int:
    return sum(data[attribute] for _, data in extraction.graph.nodes(data=True))


# --- FLOPs


@pytest.mark.slow_repeats
@EITHER_MODE
@EVERY_MODEL
def test_flops_are_those_that_torch_counts_in_a_real_run(name: str, training: bool) -> None:
    """Torch's counter gets the formulas that it lacks: CPU attention, grouped products."""
    extraction = extracted(name, training)
    with FlopCounterMode(display=False, custom_mapping=further_formulas()) as counter:
        output = forward(copy.deepcopy(extraction.step))
        if training:
            output.backward()
    assert total(extraction, "flops") == counter.get_total_flops() > 0


def test_heads_that_share_keys_cost_as_much_as_heads_of_their_own() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    queries, keys = torch.empty(2, 4, 5, 3), torch.empty(2, 1, 7, 3)
    by_hand = 2 * (2 * 4 * 5 * 7 * 3) * 2  # queries by keys, weights by values
    assert call_flops(attention, (queries, keys, keys), {}, queries) == by_hand
    assert call_flops(attention, (queries, keys.repeat(1, 4, 1, 1), keys), {}, queries) == by_hand


@pytest.mark.slow_repeats
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_multiplies_by_its_weights_at_every_step(layer: type[nn.RNNBase]) -> None:
    model = Plain(lambda m, x: m.rnn(x)[0], rnn=layer(3, 5, 2, bidirectional=True))  # type: ignore[arg-type]  # RNNBase itself takes the mode first
    extraction = extract(Workload.of(model, torch.randn(7, 2, 3), training=False))
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert total(extraction, "flops") == 2 * 7 * 2 * weights


def test_a_recurrent_kernel_multiplies_by_its_weights_and_thrice_in_training() -> None:
    """One layer, one direction; oneDNN's kernel, which bf16 and eager training on CPUs use."""
    model = Plain(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(3, 5))
    steps = torch.randn(7, 2, 3)
    by_hand = 2 * (7 * 2) * (4 * 5) * (3 + 5)  # four gates of 5 for each of 7 steps of 2 sequences
    mixed = extract(Workload.of(model, steps, training=False, dtype="bf16"))
    assert "mkldnn_rnn_layer" in {data["op"] for _, data in mixed.graph.nodes(data=True)}
    assert total(mixed, "flops") == by_hand
    with FlopCounterMode(display=False, custom_mapping=further_formulas()) as counter:
        model(steps).sum().backward()
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mkldnn_rnn_layer] == by_hand
    assert counter.get_total_flops() == 3 * by_hand


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_grouped_products_cost_as_much_as_their_parts(
    groups: int, rows: int, inner: int, columns: int
) -> None:
    grouped = torch.ops.aten._grouped_mm.default
    product = 2 * groups * rows * inner * columns
    stacked = torch.empty(groups, rows, inner), torch.empty(groups, inner, columns)
    assert call_flops(grouped, stacked, {}, stacked[0]) == product
    by_rows = torch.empty(groups * rows, inner), torch.empty(groups, inner, columns)
    assert call_flops(grouped, by_rows, {}, stacked[0]) == product
    by_inner = torch.empty(rows, groups * inner), torch.empty(groups * inner, columns)
    assert call_flops(grouped, by_inner, {}, stacked[0]) == product


# --- bytes


def fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Apply dropout as GPUs and traced steps do: the mask is saved as bool."""
    assert not inplace
    return torch.native_dropout(x, p, True)[0] if training and p else x


@EVERY_MODEL
def test_saved_bytes_are_what_autograd_saves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that forward ops write and backward ops read, each counted once.

    A traced step saves no copy of indices that it can compute from its inputs, hence the tolerance.
    """
    monkeypatch.setattr(F, "dropout", fused_dropout)
    extraction = extracted(name)
    assert total(extraction, "saved_bytes") == pytest.approx(saved_bytes(extraction.step), rel=0.05)


def test_the_new_value_of_a_buffer_is_not_saved_besides() -> None:
    norm = nn.BatchNorm1d(4)
    extraction = extract(Workload.of(norm, (torch.randn(5, 4), torch.randn(5, 4)), F.mse_loss))
    mean_and_deviation, output = 2 * 4 * 4, 4 * 5 * 4
    assert total(extraction, "saved_bytes") == mean_and_deviation + output


# --- origin of ops

OTHER_NAMES = {"embedding_dense": "embedding", "threshold": "relu"}
"""Backward ops whose names do not begin with that of the forward op."""


@EVERY_MODEL
def test_every_backward_op_differentiates_an_op_or_adds_up_gradients(name: str) -> None:
    extraction = extracted(name)
    nodes = [data for _, data in extraction.graph.nodes(data=True)]
    assert len(extraction.forward_of) == len(nodes)
    for node, forward_op in zip(nodes, extraction.forward_of, strict=True):
        if node["phase"] == "forward" or node["op"] == "add.gradient":
            assert forward_op is None
            continue
        assert forward_op is not None, node
        assert nodes[forward_op]["phase"] == "forward"
        kind, differentiates, _ = node["op"].partition("_backward")
        assert not differentiates or OTHER_NAMES.get(kind, kind) in nodes[forward_op]["op"]
